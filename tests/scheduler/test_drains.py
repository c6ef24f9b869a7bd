"""Whether a worker may leave: the scheduler's shell on an in-process broker, workers by hand."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_scheduler.drains import Drains
from headrace_shared.errors import BusUnavailable
from headrace_shared.fleet_messages import WorkerState
from headrace_shared.subjects import worker_lease_key
from tests.scheduler.builders import add, report, request, step
from tests.scheduler.shell_builders import until
from tests.scheduler.site import HandWorker, Site, World

READY, DRAINING, PARKED = WorkerState.READY, WorkerState.DRAINING, WorkerState.PARKED


class Bench:
    """One scheduler's fleet, whose drains are looked at by hand."""

    def __init__(self, world: World, site: Site) -> None:
        self.world = world
        self.site = site
        self.num_queued = 0
        self.is_readable = True
        self.num_wakes = 0
        self.drains = Drains(lambda: site.core, site.fleet, self._queued, 1.0, self._wake, world.clock)

    async def look(self, *workers: HandWorker) -> list[tuple[bool, bool] | None]:
        """The latest verdicts that the workers have heard."""
        await asyncio.sleep(0.02)
        await self.drains.look()
        await asyncio.sleep(0.02)
        said = [worker.verdicts[-1] if worker.verdicts else None for worker in workers]
        return [None if verdict is None else (verdict.is_granted, verdict.has_others) for verdict in said]

    async def _queued(self) -> int:
        if not self.is_readable:
            raise BusUnavailable("scripted")
        return self.num_queued

    def _wake(self) -> None:
        self.num_wakes += 1


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    world = World()
    yield Bench(world, await world.site())
    for site in world.sites:
        await site.stop()


async def leased(bench: Bench, *names: str) -> list[HandWorker]:
    workers = [await bench.world.worker(name) for name in names]
    await until(lambda: bench.site.known == {worker.id for worker in workers})
    return workers


async def test_one_of_two_may_go_even_while_work_waits(bench: Bench) -> None:
    one, _ = await leased(bench, "worker-1", "worker-2")
    bench.num_queued = 5
    one.hello(DRAINING)
    assert await bench.look(one) == [(True, True)]


async def test_the_last_one_stays_while_work_waits_and_goes_when_none_does(bench: Bench) -> None:
    [one] = await leased(bench, "worker-1")
    bench.num_queued = 1
    one.hello(DRAINING)
    assert await bench.look(one) == [(False, False)]
    bench.num_queued = 0
    assert await bench.look(one) == [(True, False)]
    bench.num_queued = 1  # and is called back when some comes
    assert await bench.look(one) == [(False, False)]


async def test_what_waits_in_the_scheduler_counts(bench: Bench) -> None:
    [one] = await leased(bench, "worker-1")
    one.hello(DRAINING)
    await asyncio.sleep(0.02)
    add(bench.site.core, request("r1"))
    assert await bench.look(one) == [(False, False)]


async def test_two_of_three_may_go_at_once_but_not_all_three(bench: Bench) -> None:
    one, two, three = await leased(bench, "worker-1", "worker-2", "worker-3")
    bench.num_queued = 1
    one.hello(DRAINING)
    two.hello(DRAINING)
    assert await bench.look(one, two) == [(True, True), (True, True)]
    three.hello(DRAINING)
    assert await bench.look(one, two, three) == [(False, False)] * 3


async def test_parked_and_loading_workers_replace_nobody(bench: Bench) -> None:
    one, two, three = await leased(bench, "worker-1", "worker-2", "worker-3")
    two.hello(PARKED)
    three.hello(WorkerState.LOADING)
    bench.num_queued = 1
    one.hello(DRAINING)
    assert await bench.look(one) == [(False, False)]


async def test_a_peers_worker_can_take_over(bench: Bench) -> None:
    [one] = await leased(bench, "worker-1")
    HandWorker(bench.world.broker, "worker-2").hello()
    await bench.site.stop()  # which does not lease it
    bench.num_queued = 1
    one.hello(DRAINING)
    assert await bench.look(one) == [(True, True)]


async def test_what_a_draining_worker_runs_is_left_to_a_peer_only_while_the_lease_is_ours(bench: Bench) -> None:
    [one] = await leased(bench, "worker-1")
    one.hello(DRAINING)
    await asyncio.sleep(0.02)
    fleet = bench.site.fleet
    assert not fleet.could_leave  # nobody else is there
    await bench.site.stop()
    HandWorker(bench.world.broker, "worker-2").hello()
    await asyncio.sleep(0.02)
    assert fleet.could_leave
    fleet.on_lease_lost(worker_lease_key(one.id))
    assert not fleet.could_leave  # a peer may have adopted it


async def test_nobody_is_judged_by_a_queue_that_cannot_be_read(bench: Bench) -> None:
    [one] = await leased(bench, "worker-1")
    bench.is_readable = False
    one.hello(DRAINING)
    assert await bench.look(one) == [None]


async def test_verdicts_are_repeated_but_not_at_every_look(bench: Bench) -> None:
    one, two = await leased(bench, "worker-1", "worker-2")
    one.hello(DRAINING)
    for _ in range(5):
        await bench.look(one)
    assert len(one.verdicts) == 1
    bench.world.clock.now += 1.1
    two.hello()
    await bench.look(one)
    assert len(one.verdicts) == 2


async def test_sequences_are_moved_after_a_moment(bench: Bench) -> None:
    one, two = await leased(bench, "worker-1", "worker-2")
    core = bench.site.core
    core.set_accepting(two.id, False)
    add(core, request("r1", max_tokens=60))
    step(core)
    core.set_accepting(two.id, True)
    one.hello(DRAINING)
    await bench.look(one)
    step(core)
    assert core.gauges().num_moved == 0
    bench.world.clock.now += 1.1
    two.hello()
    await bench.look(one)
    assert bench.num_wakes > 0
    step(core)
    assert core.gauges().num_moved == 1
    report(core, worker=one.id, released=(1,))
    step(core)
    assert core.gauges().workers[two.id].num_running == 1


async def test_a_parked_worker_is_let_go_and_leased_again_when_it_is_ready(bench: Bench) -> None:
    [one] = await leased(bench, "worker-1")
    one.epoch = 0
    one.hello(PARKED)
    await until(lambda: not bench.site.known and not bench.site.leases.held)
    await asyncio.sleep(0.3)
    assert bench.site.fleet.num_leased == 0 and one.num_adopted == 1
    one.hello(READY)
    await until(lambda: bench.site.known == {one.id})
    assert one.num_adopted == 2


async def test_parked_workers_make_nobodys_share_larger(bench: Bench) -> None:
    workers = [await bench.world.worker(f"worker-{number}") for number in range(4)]
    bench.site.num_schedulers = 2
    for worker in workers[2:]:
        worker.hello(PARKED)
    await asyncio.sleep(0.05)
    assert bench.site.fleet._fair_share(bench.world.clock.now) == 1
