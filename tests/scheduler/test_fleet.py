"""Leasing, adoption, and finding out who is lost; workers are scripted by hand, time too."""

import asyncio

import pytest

from headrace_scheduler.fleet import COURTESY_S, DEFERENCE_S, HANG_MARGIN_S, HANG_S, OLD_HELLO_S, SILENCE_S
from headrace_shared import codec
from headrace_shared.fleet_messages import WorkerState
from headrace_shared.leases import LEASE_TTL_S, LeaseRecord
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import Progress, WorkerId
from headrace_shared.subjects import LEASES, hello_subject, progress_subject, worker_lease_key
from tests.scheduler.shell_builders import MODEL, until
from tests.scheduler.site import HandWorker, World


async def test_a_ready_worker_is_leased_and_adopted(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known == {worker.id})
    assert site.fleet.has_active and worker.epoch == 1
    assert site.leases.held[worker_lease_key(worker.id)].epoch == 1


async def test_a_loading_worker_is_left_alone(world: World) -> None:
    site = await world.site()
    worker = HandWorker(world.broker)
    await worker.bus.subscribe(f"grants.{worker.id}", worker._on_control)
    worker.hello(WorkerState.LOADING)
    await asyncio.sleep(0.3)
    assert worker.num_adopted == 0
    worker.hello(WorkerState.READY)
    await until(lambda: site.known)


async def test_more_workers_than_can_be_remembered_are_not_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_scheduler.fleet.MAX_WORKERS", 1)
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known == {worker.id})
    other = await world.worker("worker-2")
    await world.pass_time(COURTESY_S + 0.5, worker, other)
    assert site.known == {worker.id} and other.num_adopted == 0


async def test_a_silent_worker_is_lost_and_its_lease_given_up(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    await world.pass_time(SILENCE_S - 0.5, worker)
    assert site.known
    await world.pass_time(SILENCE_S + 0.5)
    assert not site.known and not site.fleet.has_active
    await until(lambda: not site.leases.held)
    observed = site.leases.observed(worker_lease_key(worker.id))
    assert observed is not None and observed.record.holder == "" and observed.record.epoch == 1
    worker.hello()
    await until(lambda: site.known)
    assert worker.epoch == 2, "one that only stalled comes back under a higher epoch"


async def test_a_leaving_worker_is_lost_at_once(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    worker.hello(WorkerState.LEAVING)
    await until(lambda: not site.known)
    assert worker.num_adopted == 1


async def test_a_missing_progress_is_repaired_by_a_new_epoch(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    worker.progress(number=2)
    await until(lambda: worker.epoch == 2)
    assert len(site.adoptions) == 2 and site.usurped == []


async def test_a_worker_that_does_not_answer_is_asked_again_ever_more_slowly(world: World) -> None:
    site = await world.site()
    worker = HandWorker(world.broker)
    worker.answers = False
    await worker.start()
    await world.pass_time(6.0, worker)
    assert 2 <= worker.num_adopted <= 4
    worker.answers = True
    for _ in range(24):
        if site.known:
            break
        await world.pass_time(0.25, worker)
    assert site.known == {worker.id} and site.usurped == []


async def test_a_worker_that_dropped_everything_is_adopted_again(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    worker.epoch = 0
    worker.hello()  # perhaps an old one
    await asyncio.sleep(0.2)
    assert worker.num_adopted == 1
    worker.epoch = 1
    await world.pass_time(OLD_HELLO_S + 0.25, worker)
    worker.epoch = 0
    worker.hello()
    await until(lambda: worker.epoch == 2)
    assert site.usurped == []


async def test_a_draining_worker_is_kept_but_gets_nothing_new(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    assert site.core.room() > 0
    worker.hello(WorkerState.DRAINING)
    await until(lambda: site.core.room() == 0)
    assert site.known


async def test_nobody_is_lost_while_the_broker_is_away(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    world.broker.stop()
    await world.pass_time(SILENCE_S + 1.0)
    assert site.known == {worker.id}
    world.broker.start()
    await asyncio.sleep(0.2)
    assert site.known == {worker.id}


async def test_an_expired_lease_that_nobody_took_is_taken_again(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    world.broker.stop()
    await world.pass_time(LEASE_TTL_S + 1.0)
    assert not site.fleet.has_active
    world.broker.start()
    await world.pass_time(LEASE_TTL_S + 1.0, worker)
    assert worker.epoch == 2 and site.usurped == [] and site.known == {worker.id}


async def test_a_lease_that_a_peer_has_taken_is_told(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    taken = codec.encode(LeaseRecord(holder="peer", epoch=2))
    await MemoryBus(world.broker).put(LEASES.name, worker_lease_key(worker.id), taken)
    await world.pass_time(2.0, worker)
    assert site.usurped and not site.fleet.has_active


async def test_two_schedulers_share_the_workers(world: World) -> None:
    first = await world.site("scheduler-1")
    second = await world.site("scheduler-2")
    first.num_schedulers = second.num_schedulers = 2
    workers = [HandWorker(world.broker, f"worker-{number}") for number in range(4)]
    for worker in workers:
        await worker.bus.subscribe(f"grants.{worker.id}", worker._on_control)
    for worker in workers:
        worker.hello()
    await world.pass_time(0.5, *workers)
    await until(lambda: len(first.known) + len(second.known) == 4)
    assert len(first.known) == len(second.known) == 2


async def test_workers_are_handed_over_to_a_peer_that_comes_later(world: World) -> None:
    first = await world.site("scheduler-1")
    workers = [await world.worker(f"worker-{number}") for number in range(4)]
    await until(lambda: len(first.known) == 4)
    second = await world.site("scheduler-2")
    first.num_schedulers = second.num_schedulers = 2
    await world.pass_time(8.0, *workers)
    assert len(first.known) == len(second.known) == 2
    assert first.usurped == second.usurped == []
    assert sum(worker.num_adopted for worker in workers) == 6


async def test_a_peer_that_does_not_want_a_worker_is_offered_it_ever_less_often(world: World) -> None:
    site = await world.site()
    workers = [await world.worker(f"worker-{number}") for number in range(2)]
    await until(lambda: len(site.known) == 2)
    site.num_schedulers = 2  # the other one never acts
    await world.pass_time(20.0, *workers)
    assert 3 <= sum(worker.num_adopted for worker in workers) <= 5
    assert site.usurped == []


async def test_after_an_outage_each_takes_back_its_own(world: World) -> None:
    """Their leases have expired: whoever takes another's worker does not know what it held."""
    first, second = await world.site("scheduler-1"), await world.site("scheduler-2")
    first.num_schedulers = second.num_schedulers = 2
    first.present, second.present = {"scheduler-2"}, {"scheduler-1"}
    workers = [HandWorker(world.broker, f"worker-{number}") for number in range(4)]
    for worker in workers:
        await worker.start()
    await world.pass_time(0.5, *workers)
    await until(lambda: len(first.known) == len(second.known) == 2)
    before = first.known, second.known
    world.broker.stop()
    await world.pass_time(LEASE_TTL_S + 1.0)
    world.broker.start()
    await world.pass_time(1.5, *workers)
    assert (first.known, second.known) == before and first.fleet.has_active and second.fleet.has_active
    assert first.usurped == second.usurped == []
    assert all(worker.epoch == 2 for worker in workers)


async def test_a_holder_that_does_not_come_back_is_not_waited_for_long(world: World) -> None:
    site = await world.site()
    site.present = {"scheduler-2"}
    worker = HandWorker(world.broker)
    held = codec.encode(LeaseRecord(holder="scheduler-2", epoch=1))
    await site.bus.put(LEASES.name, worker_lease_key(worker.id), held)
    await worker.start()
    await world.pass_time(LEASE_TTL_S + DEFERENCE_S - 0.5, worker)
    assert not site.known
    await world.pass_time(1.5, worker)
    assert site.known == {worker.id}


async def test_a_worker_that_a_peer_leaves_free_is_taken_after_a_moment(world: World) -> None:
    site = await world.site()
    site.num_schedulers = 2  # the other one never acts
    first, second = await world.worker("worker-1"), await world.worker("worker-2")
    await until(lambda: len(site.known) == 1)
    await world.pass_time(COURTESY_S / 2, first, second)
    assert len(site.known) == 1
    await world.pass_time(COURTESY_S, first, second)
    await until(lambda: len(site.known) == 2)


async def test_an_engine_that_hangs_is_lost_and_banished(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    site.fleet.find_hangs({worker.id: False})
    await world.pass_time(1.0, worker)
    link = site.fleet.link(worker.id)
    assert link is not None
    link.iterated_at = world.clock.now - HANG_S - HANG_MARGIN_S - 1.0
    site.fleet.find_hangs({worker.id: False})
    assert site.known, "an idle engine stands still for good reason"
    link.iterated_at = world.clock.now - HANG_S - HANG_MARGIN_S - 1.0
    site.fleet.find_hangs({worker.id: True})
    assert not site.known
    await world.pass_time(1.0, worker)
    assert not site.known and worker.num_adopted == 1


async def test_leaving_gives_all_leases_up(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    await site.fleet.release_all()
    assert site.leases.held == {}
    successor = await world.site("scheduler-2")
    worker.hello()
    await until(lambda: successor.known == {worker.id})
    assert worker.epoch == 2


async def test_rubbish_is_dropped(world: World) -> None:
    site = await world.site()
    bus = MemoryBus(world.broker)
    bus.publish(hello_subject(MODEL, WorkerId("x")), b"\xc1")
    bus.publish(progress_subject(site.id), b"\xc1")
    bus.publish(
        progress_subject(site.id), codec.encode(Progress(worker=WorkerId("stranger"), epoch=1, number=1, grant_seen=0))
    )
    worker = await world.worker()
    await until(lambda: site.known == {worker.id})
