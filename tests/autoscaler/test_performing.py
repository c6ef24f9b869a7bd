"""Planned starts that are more than can be under way at a time."""

import asyncio
from typing import cast

from headrace_autoscaler.driver import Driver, Instance
from headrace_autoscaler.leadership import Leadership
from headrace_autoscaler.matching import Target
from headrace_autoscaler.performing import MAX_TASKS, Performing, new_worker_id
from headrace_autoscaler.reconcile import Reconciler
from headrace_autoscaler.repair import Bounds
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import WorkerId
from headrace_shared.service import Service


class _Leading:
    epoch = 1


class _SlowDriver:
    def __init__(self) -> None:
        self.asked: list[WorkerId] = []

    async def start(self, model: str, worker: WorkerId, epoch: int, *, parked: bool) -> Instance:
        self.asked.append(worker)
        await asyncio.sleep(3600)
        raise AssertionError


async def test_starts_for_which_there_is_no_room_are_not_taken_for_workers_on_their_way() -> None:
    service = Service("autoscaler")
    driver = _SlowDriver()
    wanted = MAX_TASKS + 8

    async def body(service: Service) -> None:
        leadership = cast(Leadership, _Leading())
        performing = Performing(service, MemoryBus(), cast(Driver, driver), leadership, lambda: 0.0)
        reconciler = Reconciler(new_worker_id, Bounds())
        plan = reconciler.plan(Target(wanted), [], 0.0, shown_at=0.0, heard_for_s=10.0)
        assert len(plan.actions) == wanted
        performing.perform("m", reconciler, plan.actions, 1)
        await asyncio.sleep(0.01)
        assert len(driver.asked) == MAX_TASKS
        assert reconciler.look([], 1.0, shown_at=1.0).coming == MAX_TASKS
        again = reconciler.plan(Target(wanted), [], 1.0, shown_at=1.0, heard_for_s=10.0)
        assert len(again.actions) == wanted - MAX_TASKS, "asked for again, and not a minute later"

    assert await service.run(body, drain_timeout_s=1) == 0
