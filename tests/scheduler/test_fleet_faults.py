"""Workers that come back under their old names, never answer, or tell what cannot be; and a broker that forgets."""

import pytest
from msgspec.structs import replace

from headrace_scheduler.fleet import BANISH_S
from headrace_scheduler.hello_facts import least_epoch, plausible
from headrace_shared.errors import ProtocolError
from headrace_shared.fleet_messages import WorkerState
from headrace_shared.leases import LEASE_TTL_S
from headrace_shared.messages import Admission, BlockId, SequenceId, SequenceSnapshot
from headrace_shared.subjects import LEASES, worker_lease_key
from tests.scheduler.shell_builders import request, until
from tests.scheduler.site import HELLO, HandWorker, World


async def test_a_worker_that_starts_anew_under_its_old_name_is_lost_at_once(world: World) -> None:
    """Before it could be missed; else nothing that it had would move until it has loaded."""
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    worker.epoch = 0
    worker.hello(WorkerState.LOADING)
    await until(lambda: not site.known)
    worker.hello()
    await until(lambda: site.known)
    assert worker.epoch == 2 and site.usurped == []


async def test_a_broker_that_has_lost_its_leases_costs_no_worker(world: World) -> None:
    """A worker obeys no epoch below the one it knows."""
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known)
    worker.epoch = 57
    worker.hello()
    await site.bus.remove(LEASES.name, worker_lease_key(worker.id))
    await world.pass_time(LEASE_TTL_S + 1.0, worker)
    await until(lambda: worker.epoch == 58)
    for claim in (1 << 63, -5):
        assert least_epoch(replace(HELLO, epoch=claim)) == 1


async def test_a_worker_that_never_answers_is_asked_for_days(world: World) -> None:
    site = await world.site()
    worker = HandWorker(world.broker)
    worker.answers = False
    await worker.start()
    await until(lambda: worker.num_adopted == 1)
    site.fleet._workers[worker.id].num_failures = 100_000
    await world.pass_time(2.5, worker)
    assert site.fleet._workers[worker.id].num_failures > 100_000 and not site.tasks[0].done()


def test_a_worker_has_a_workers_figures() -> None:
    for state in WorkerState:
        assert plausible(replace(HELLO, state=state))
    assert plausible(replace(HELLO, state=WorkerState.LOADING, num_blocks=0, block_size=0))
    names = ("num_blocks", "block_size", "context", "max_sequences", "tokens_per_iteration")
    wrong = [replace(HELLO, **{name: number}) for name in names for number in (0, -1)]
    for hello in [*wrong, replace(HELLO, num_blocks=10**12)]:  # its scheduler would need the memory
        with pytest.raises(ProtocolError):
            plausible(hello)


@pytest.mark.parametrize("fault", ["choice", "block"])
async def test_a_worker_that_tells_what_cannot_be_is_banished_and_all_begins_anew(world: World, fault: str) -> None:
    """Half of what it told may be in the core: requests there would wait for ever."""
    site = await world.site()
    worker = HandWorker(world.broker)
    admission = Admission(
        sequence_id=SequenceId(1),
        request=request(),
        choice=7 if fault == "choice" else 0,
        attempt=0,
        block_ids=(BlockId(8_000_000 if fault == "block" else 0),),
    )
    worker.holds = (SequenceSnapshot(admission=admission, tokens=b"", num_computed=0),)
    await worker.start()
    await until(lambda: site.usurped)
    assert not site.fleet.has_active
    worker.holds = ()
    await world.pass_time(1.0, worker)
    assert worker.num_adopted == 1 and not site.tasks[0].done()
    world.clock.now += BANISH_S
    await world.pass_time(0.5, worker)
    await until(lambda: site.known)
