"""Node 0 on an in-process broker."""

import pytest

from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.service import Service
from headrace_shared.subjects import GROUPS, group_key
from headrace_worker.parallel.leader_node import LeaderNode, NodesMissing
from headrace_worker.settings import WorkerSettings

SETTINGS = WorkerSettings(tensor_parallel=2, num_nodes=2, group="g", group_host="127.0.0.1", load_timeout_s=0.4)


async def lead(bus: MemoryBus) -> None:
    service = Service("worker", "worker-1")

    async def body(_: Service) -> None:
        async with LeaderNode(service, bus, SETTINGS, lambda: "") as node:
            await node.assemble()

    await service.run(body, 1.0)


async def test_a_group_that_is_not_complete_in_time_is_given_up_with_the_missing_nodes_and_free_at_once() -> None:
    bus = MemoryBus(MemoryBroker())
    for epoch in (1, 2):
        with pytest.raises(NodesMissing, match="nodes 1 did not join"):
            await lead(bus)
        entry = await bus.get(GROUPS.name, group_key("g", 0))
        assert entry is not None and b"ended" in entry.value and b"did not join" in entry.value
        assert b"epoch" + bytes([epoch]) in entry.value
