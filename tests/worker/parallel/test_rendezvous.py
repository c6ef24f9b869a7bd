"""What a node concludes from the records of its group."""

from msgspec.structs import replace

from headrace_shared.codec import decode, encode
from headrace_worker.config import EngineConfig
from headrace_worker.parallel.rendezvous import LOST_S, GroupView, LeaderRecord, MemberRecord, NodeRecord, NodeState

LEADER = LeaderRecord(
    holder="a",
    epoch=4,
    state=NodeState.ASSEMBLING,
    num_nodes=3,
    tensor_parallel=3,
    pipeline_parallel=2,
    host="10.0.0.1",
    store_port=1,
    command_port=2,
    token="t",
    config=EngineConfig(),
)
MEMBER = MemberRecord(holder="b", epoch=4, state=NodeState.JOINED, host="10.0.0.2")


class Watch:
    """A view and its broker: records are renewed every second, unless `stopped`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.view = GroupView(0.0)
        self.records: dict[int, NodeRecord] = {}
        self.stopped: set[int] = set()
        self.is_connected = True
        self._revision = 0

    def put(self, node_rank: int, record: NodeRecord) -> None:
        self.records[node_rank] = record
        self._revision += 1
        self.view.observe(node_rank, record, self._revision, self.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            self.view.tick(self.now, self.is_connected)
            if self.is_connected and self.now % 1.0 == 0.0:
                for node_rank in self.records.keys() - self.stopped:
                    self.put(node_rank, self.records[node_rank])


def assembled() -> Watch:
    watch = Watch()
    watch.put(0, replace(LEADER, state=NodeState.RUNNING))
    watch.put(1, MEMBER)
    watch.put(2, replace(MEMBER, holder="c"))
    watch.run(2.0)
    return watch


def test_records_survive_the_wire() -> None:
    for record in (LEADER, MEMBER):
        assert decode(encode(record), NodeRecord) == record


def test_a_place_is_free_when_nobody_has_it_or_its_holder_has_ended_or_is_silent() -> None:
    watch = Watch()
    assert watch.view.is_free(0, watch.now) and watch.view.next_epoch() == 1
    watch.put(0, LEADER)
    watch.run(20.0)
    assert not watch.view.is_free(0, watch.now) and watch.view.next_epoch() == 5
    watch.put(0, replace(LEADER, state=NodeState.ENDED))
    assert watch.view.is_free(0, watch.now) and watch.view.next_epoch() == 5
    watch.put(0, LEADER)
    watch.stopped.add(0)
    watch.run(LOST_S)
    assert not watch.view.is_free(0, watch.now)
    watch.run(0.5)
    assert watch.view.is_free(0, watch.now)


def test_a_new_leader_goes_beyond_the_epoch_of_whoever_waits_for_one() -> None:
    watch = Watch()
    watch.put(1, MEMBER)
    assert watch.view.record(0) is None and watch.view.next_epoch() == MEMBER.epoch + 1


def test_a_leader_is_joined_only_when_it_has_shown_that_it_lives() -> None:
    watch = Watch()
    watch.put(0, LEADER)
    assert watch.view.leader_to_join(0, watch.now) is None
    watch.run(1.0)
    assert watch.view.leader_to_join(0, watch.now) == LEADER
    assert watch.view.leader_to_join(3, watch.now) == LEADER
    assert watch.view.leader_to_join(4, watch.now) is None, "this node was in that epoch"
    watch.put(0, replace(LEADER, state=NodeState.RUNNING))
    assert watch.view.leader_to_join(0, watch.now) is None, "too late"


def test_nodes_are_missing_until_they_have_joined_this_epoch_and_again_when_they_are_lost() -> None:
    watch = Watch()
    watch.put(0, LEADER)
    assert watch.view.missing(LEADER, watch.now) == [1, 2]
    watch.put(1, replace(MEMBER, epoch=3))
    assert watch.view.missing(LEADER, watch.now) == [1, 2]
    watch.put(1, MEMBER)
    watch.put(2, replace(MEMBER, holder="c"))
    assert watch.view.missing(LEADER, watch.now) == []
    watch.stopped.add(2)
    watch.run(LOST_S + 0.5)
    assert watch.view.missing(LEADER, watch.now) == [2]


def test_a_group_that_is_well_is_given_up_by_nobody() -> None:
    watch = assembled()
    watch.run(60.0)
    assert watch.view.lost_member(LEADER, watch.now) is None
    assert watch.view.lost_leader(LEADER, watch.now) is None
    assert not watch.view.drains(LEADER)


def test_a_silent_node_takes_the_group_down_within_ten_seconds() -> None:
    watch = assembled()
    watch.stopped |= {0, 2}
    watch.run(LOST_S + 1.5)
    assert (watch.view.lost_member(LEADER, watch.now) or "").startswith("node 2 has given no sign of life")
    assert (watch.view.lost_leader(LEADER, watch.now) or "").startswith("node 0 has given no sign of life")


def test_time_without_the_broker_speaks_against_nobody() -> None:
    watch = assembled()
    watch.is_connected = False
    watch.run(60.0)
    watch.is_connected = True
    assert watch.view.lost_member(LEADER, watch.now) is None
    watch.run(60.0)
    assert watch.view.lost_member(LEADER, watch.now) is None


def test_an_observer_that_was_frozen_blames_nobody_for_it() -> None:
    watch = assembled()
    watch.now += 100.0
    watch.view.tick(watch.now, True)
    assert watch.view.lost_leader(LEADER, watch.now) is None


def test_a_node_that_ended_or_came_again_is_lost_with_its_reason() -> None:
    watch = assembled()
    watch.put(1, replace(MEMBER, state=NodeState.ENDED, reason="no GPU"))
    assert watch.view.lost_member(LEADER, watch.now) == "node 1 has ended: no GPU"
    watch.put(1, replace(MEMBER, holder="d", epoch=5))
    assert watch.view.lost_member(LEADER, watch.now) == "node 1 was started anew"
    watch.view.observe(1, None, 0, watch.now)
    assert watch.view.lost_member(LEADER, watch.now) == "node 1 has left"
    watch.put(0, replace(LEADER, holder="z", epoch=5))
    assert watch.view.lost_leader(LEADER, watch.now) == "node 0 was started anew"


def test_a_node_that_is_to_stop_is_seen() -> None:
    watch = assembled()
    watch.put(2, replace(MEMBER, holder="c", state=NodeState.DRAINING))
    assert watch.view.drains(LEADER)
    assert watch.view.lost_member(LEADER, watch.now) is None


def test_what_a_watch_repeats_is_no_sign_of_life() -> None:
    watch = Watch()
    watch.put(0, LEADER)
    watch.stopped.add(0)
    for _ in range(4):
        watch.run(0.75)
        watch.view.observe(0, LEADER, 1, watch.now)
    assert watch.view.leader_to_join(0, watch.now) is None
