"""How the nodes of a group find each other through the broker. Pure: records in, decisions out, time as an argument.

Each node (one machine's part of a group) keeps a record in the bucket GROUPS and writes it again every second. Node 0,
the leader, takes the group by compare-and-set, which raises its epoch by one, and says where its ranks listen. The
others join that epoch; when all have, the leader says `RUNNING`, and every node starts its ranks. A node that is lost
takes the group down. Whoever comes again finds another epoch.

    leader:  ASSEMBLING -> RUNNING -> ENDED        others:  JOINED -> (DRAINING ->) ENDED

A record is alive if it has changed lately by the observer's own monotonic clock; time without a broker does not count,
nor does a record that has never changed under the observer's eyes: it may be a dead one's.
"""

from enum import StrEnum

from msgspec import Struct

from headrace_worker.config import EngineConfig
from headrace_worker.parallel.place import RankPlace

RENEW_S = 1.0
LOST_S = 5.0
"""Without a change: several renewals may be late, and the whole must be noticed within ten seconds."""
FROZEN_S = 1.0
"""A gap between two ticks that the observer itself was stopped for."""


class NodeState(StrEnum):
    ASSEMBLING = "assembling"
    JOINED = "joined"
    RUNNING = "running"
    DRAINING = "draining"
    """Was told to stop: the leader is to finish what runs, then to end the group."""
    ENDED = "ended"


class LeaderRecord(Struct, frozen=True, tag="leader", kw_only=True):
    holder: str
    """Unique for each start of a process."""
    epoch: int
    state: NodeState
    num_nodes: int
    tensor_parallel: int
    pipeline_parallel: int
    host: str
    store_port: int
    command_port: int
    token: str
    """Lets ranks in. Whoever may read the bucket may read requests as well."""
    config: EngineConfig
    """What must be the same on all nodes is taken from it."""
    reason: str = ""
    """Why it ended; empty: as it was told to."""

    def common_place(self, host: str) -> RankPlace:
        """What the places of all ranks on the machine `host` have in common."""
        return RankPlace(
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            host=host,
            leader_host=self.host,
            store_port=self.store_port,
            command_port=self.command_port,
            token=self.token,
        )


class MemberRecord(Struct, frozen=True, tag="member", kw_only=True):
    holder: str
    epoch: int
    """Of the group it has joined."""
    state: NodeState
    host: str
    reason: str = ""


NodeRecord = LeaderRecord | MemberRecord


class _Seen:
    __slots__ = ("changed_at", "is_renewed", "record", "revision")

    def __init__(self, record: NodeRecord, revision: int, now: float) -> None:
        self.record = record
        self.revision = revision
        self.changed_at = now
        self.is_renewed = False


class GroupView:
    """The records of one group as one node sees them."""

    def __init__(self, now: float) -> None:
        self._nodes: dict[int, _Seen] = {}
        self._ticked_at = now

    def observe(self, node_rank: int, record: NodeRecord | None, revision: int, now: float) -> None:
        """What a watch reports; None for a removed record. A watch may repeat itself."""
        seen = self._nodes.get(node_rank)
        if record is None:
            self._nodes.pop(node_rank, None)
        elif seen is None:
            self._nodes[node_rank] = _Seen(record, revision, now)
        elif revision > seen.revision:
            seen.record, seen.revision, seen.changed_at, seen.is_renewed = record, revision, now, True

    def tick(self, now: float, is_connected: bool) -> None:
        """To be called several times a second."""
        passed_s = now - self._ticked_at
        self._ticked_at = now
        if not is_connected or passed_s > FROZEN_S:
            for seen in self._nodes.values():
                seen.changed_at += passed_s

    def record(self, node_rank: int) -> NodeRecord | None:
        seen = self._nodes.get(node_rank)
        return None if seen is None else seen.record

    def revision(self, node_rank: int) -> int | None:
        seen = self._nodes.get(node_rank)
        return None if seen is None else seen.revision

    def is_free(self, node_rank: int, now: float) -> bool:
        """Nobody has this place in the group, as far as we see; taking it may still fail."""
        seen = self._nodes.get(node_rank)
        return seen is None or seen.record.state is NodeState.ENDED or now - seen.changed_at > LOST_S

    def next_epoch(self) -> int:
        # The record of the last leader may be gone while others still wait for one of a later epoch.
        return 1 + max((seen.record.epoch for seen in self._nodes.values()), default=0)

    def leader_to_join(self, left: int, now: float) -> LeaderRecord | None:
        """A leader that lives and waits for nodes. `left`: the highest epoch that this node has been in."""
        seen = self._nodes.get(0)
        if seen is None or not seen.is_renewed or now - seen.changed_at > LOST_S:
            return None
        record = seen.record
        if not isinstance(record, LeaderRecord) or record.state is not NodeState.ASSEMBLING or record.epoch <= left:
            return None
        return record

    def missing(self, leader: LeaderRecord, now: float) -> list[int]:
        """Nodes that have not joined, or have been lost again."""
        return [
            node_rank
            for node_rank in range(1, leader.num_nodes)
            if (seen := self._nodes.get(node_rank)) is None
            or seen.record.epoch != leader.epoch
            or seen.record.state is not NodeState.JOINED
            or now - seen.changed_at > LOST_S
        ]

    def drains(self, leader: LeaderRecord) -> bool:
        """A node that has joined was told to stop."""
        return any(
            record.epoch == leader.epoch and record.state is NodeState.DRAINING
            for node_rank in range(1, leader.num_nodes)
            if (record := self.record(node_rank)) is not None
        )

    def lost_member(self, leader: LeaderRecord, now: float) -> str | None:
        """Why the leader must give the group up, all nodes of which had joined; None if it need not."""
        for node_rank in range(1, leader.num_nodes):
            if (problem := self._problem(node_rank, leader.epoch, now)) is not None:
                return problem
        return None

    def lost_leader(self, leader: LeaderRecord, now: float) -> str | None:
        """Why a node must leave the group of `leader`; None if it need not. A leader that has ended as it was told to
        is for the caller to see."""
        record = self.record(0)
        if record is not None and record.holder != leader.holder:
            return "node 0 was started anew"
        return self._problem(0, leader.epoch, now)

    def _problem(self, node_rank: int, epoch: int, now: float) -> str | None:
        seen = self._nodes.get(node_rank)
        if seen is None:
            return f"node {node_rank} has left"
        if seen.record.state is NodeState.ENDED and seen.record.epoch == epoch:
            return f"node {node_rank} has ended" + (f": {seen.record.reason}" if seen.record.reason else "")
        if seen.record.epoch != epoch:
            return f"node {node_rank} was started anew"
        if now - seen.changed_at > LOST_S:
            return f"node {node_rank} has given no sign of life for {now - seen.changed_at:.1f} s"
        return None
