"""One node's record in the broker: taken by compare-and-set, written again every second, watched by the others."""

import asyncio
import time
from collections.abc import Callable

import structlog
from msgspec.structs import replace

from headrace_shared.bus import Bus, Entry, Subscription
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, HeadraceError, ProtocolError, RevisionConflict
from headrace_shared.subjects import GROUPS, group_key
from headrace_worker.parallel.rendezvous import RENEW_S, GroupView, LeaderRecord, MemberRecord, NodeRecord, NodeState

CHECK_S = 0.25

log = structlog.get_logger(__name__)


class NodeReplaced(HeadraceError):
    """Another process has this node's place in the group."""

    def __init__(self, node_rank: int) -> None:
        super().__init__(f"another process is node {node_rank} of the group now")


class GroupUnreachable(HeadraceError):
    """The group's records could not be written for as long as was to be waited."""


class Presence:
    """Belongs to one event loop; `open` before use. `view`: what it sees of the group, brought up to date by `tick`."""

    def __init__(
        self,
        bus: Bus,
        group: str,
        node_rank: int,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience_s`: how long a place in the group, or the broker, is waited for."""
        self._bus = bus
        self._patience_s = patience_s
        self._group = group
        self._node_rank = node_rank
        self._key = group_key(group, node_rank)
        self._clock = clock
        self._record: NodeRecord | None = None
        self._revision = 0
        self._lock = asyncio.Lock()
        self._watch: Subscription | None = None
        self.view = GroupView(clock())

    @property
    def now(self) -> float:
        return self._clock()

    async def open(self) -> None:
        """Raises BusUnavailable."""
        await self._bus.ensure_bucket(GROUPS)
        self._watch = await self._bus.watch(GROUPS.name, self._on_change)

    async def close(self, reason: str) -> None:
        """Gives the place up, so that nobody need wait until the record is old. `reason`: empty if all is well."""
        try:
            if self._record is not None:
                await self._change(state=NodeState.ENDED, reason=reason)
        except (BusError, NodeReplaced) as error:
            log.info("the end of this node was not told", error=str(error))
        if self._watch is not None:
            await self._watch.close()

    def tick(self) -> None:
        """To be called several times a second."""
        self.view.tick(self._clock(), self._bus.is_connected)

    async def take(self, make: Callable[[], NodeRecord]) -> None:
        """Waits until nobody lives at this place of the group, and puts the record there. `make` is called when it is
        to be written: its epoch depends on what is there. Raises GroupUnreachable."""
        deadline = self._clock() + self._patience_s
        problem = "another process has it"
        while self._clock() < deadline:
            self.tick()
            if self.view.is_free(self._node_rank, self._clock()):
                record, revision = make(), self.view.revision(self._node_rank)
                try:
                    self._revision = await self._write(record, revision)
                    self._record = record
                    return
                except BusError as error:
                    problem = str(error)
                    log.info("place in the group not taken yet", error=problem)
            await asyncio.sleep(CHECK_S)
        raise GroupUnreachable(f"node {self._node_rank}'s place was not free for {self._patience_s:g} s: {problem}")

    async def change(self, state: NodeState, epoch: int | None = None) -> None:
        """Tells the others. Tries until the broker has it. Raises NodeReplaced, or GroupUnreachable."""
        deadline = self._clock() + self._patience_s
        while True:
            try:
                await self._change(state=state, epoch=epoch)
                return
            except BusError as error:
                log.info("state in the group not told yet", state=state.value, error=str(error))
                if self._clock() >= deadline:
                    raise GroupUnreachable(
                        f"state {state.value} could not be told for {self._patience_s:g} s: {error}"
                    ) from error
                await asyncio.sleep(CHECK_S)

    async def keep(self) -> None:
        """Writes the record again every second, for ever; run it as a task. Raises NodeReplaced."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._change()
            except BusError as error:
                log.debug("record not renewed yet", error=str(error))

    async def _change(
        self, *, state: NodeState | None = None, epoch: int | None = None, reason: str | None = None
    ) -> None:
        async with self._lock:
            assert self._record is not None, "changed before it was taken"
            record = _changed(self._record, state, epoch, reason)
            try:
                self._revision = await self._write(record, self._revision)
            except RevisionConflict as error:
                # An earlier write of ours, whose answer was lost, looks the same.
                entry = await self._bus.get(GROUPS.name, self._key)
                if entry is not None and _holder(entry.value) != record.holder:
                    raise NodeReplaced(self._node_rank) from error
                self._revision = await self._write(record, None if entry is None else entry.revision)
            self._record = record

    async def _write(self, record: NodeRecord, revision: int | None) -> int:
        if revision is None:
            return await self._bus.create(GROUPS.name, self._key, encode(record))
        return await self._bus.update(GROUPS.name, self._key, encode(record), revision)

    def _on_change(self, entry: Entry | None, key: str) -> None:
        head, _, tail = key.rpartition(".")
        if f"{head}." != group_key(self._group, 0)[:-1] or not tail.isdigit():
            return  # of another group
        try:
            record = None if entry is None else decode(entry.value, NodeRecord)
        except ProtocolError as error:
            log.warning("undecodable record of a node", key=key, error=str(error))
            return
        self.view.observe(int(tail), record, 0 if entry is None else entry.revision, self._clock())


def _holder(value: bytes) -> str | None:
    """None: what is there was not written by this version, so not by us."""
    try:
        record: NodeRecord = decode(value, NodeRecord)
    except ProtocolError:
        return None
    return record.holder


def _changed(record: NodeRecord, state: NodeState | None, epoch: int | None, reason: str | None) -> NodeRecord:
    state = record.state if state is None else state
    epoch = record.epoch if epoch is None else epoch
    reason = record.reason if reason is None else reason
    if isinstance(record, LeaderRecord):
        return replace(record, state=state, epoch=epoch, reason=reason)
    assert isinstance(record, MemberRecord)
    return replace(record, state=state, epoch=epoch, reason=reason)
