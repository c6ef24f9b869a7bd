"""A node's own record, on an in-process broker: taken, changed, lost."""

import pytest

from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.subjects import GROUPS, group_key
from headrace_worker.parallel.presence import GroupUnreachable, NodeReplaced, Presence
from headrace_worker.parallel.rendezvous import MemberRecord, NodeState

PATIENCE_S = 0.3


def record(holder: str) -> MemberRecord:
    return MemberRecord(holder=holder, epoch=1, state=NodeState.JOINED, host="h")


async def presence(broker: MemoryBroker) -> Presence:
    opened = Presence(MemoryBus(broker), "g", 1, PATIENCE_S)
    await opened.open()
    return opened


async def test_a_place_that_another_process_keeps_is_waited_for_only_so_long() -> None:
    broker = MemoryBroker()
    first, second = await presence(broker), await presence(broker)
    await first.take(lambda: record("a"))
    with pytest.raises(GroupUnreachable, match=r"node 1's place was not free for 0\.3 s"):
        await second.take(lambda: record("b"))


async def test_without_a_broker_neither_taking_nor_changing_goes_on_for_ever() -> None:
    broker = MemoryBroker()
    taken, other = await presence(broker), Presence(MemoryBus(broker), "g", 2, PATIENCE_S)
    await taken.take(lambda: record("a"))
    await other.open()
    broker.stop()
    with pytest.raises(GroupUnreachable, match="draining"):
        await taken.change(NodeState.DRAINING)
    with pytest.raises(GroupUnreachable, match="node 2"):
        await other.take(lambda: record("b"))


@pytest.mark.parametrize("value", [b"\xc1", None])
async def test_a_record_that_is_not_ours_any_more_means_that_we_were_replaced(value: bytes | None) -> None:
    broker = MemoryBroker()
    ours, other = await presence(broker), MemoryBus(broker)
    await ours.take(lambda: record("a"))
    if value is None:
        # Removed, not replaced: it is written again.
        await other.remove(GROUPS.name, group_key("g", 1))
        await ours.change(NodeState.DRAINING)
        return
    await other.put(GROUPS.name, group_key("g", 1), value)
    with pytest.raises(NodeReplaced):
        await ours.change(NodeState.DRAINING)
