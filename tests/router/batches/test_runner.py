"""Who runs which batch: leases, turns, and what becomes of them in trouble."""

import asyncio

import pytest

from headrace_router.batches import runner as runner_module
from headrace_router.batches.record import BatchRecord, BatchState
from headrace_router.batches.results import LineResult
from headrace_router.batches.runner import BatchRunner
from headrace_router.batches.turns import ActiveLimits
from headrace_router.bodies import Body
from headrace_router.call import Call
from headrace_router.owners import owner_token
from headrace_shared.errors import BusUnavailable
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.subjects import BATCH_RESULTS, FILES
from headrace_shared.tasks import end
from tests.router.batches.world import OWNER, URL, World
from tests.router.support import until


class Routers:
    """So many runners on one broker, each with a connection of its own."""

    def __init__(self, world: World, count: int) -> None:
        self.runners: list[BatchRunner] = []
        self.buses: list[MemoryBus] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._world, self._count = world, count

    async def __aenter__(self) -> "Routers":
        for number in range(self._count):
            bus = MemoryBus(self._world.bus.broker)
            runner = BatchRunner(bus, f"router-{number}", self._world.parts, ActiveLimits(4, 4))
            await runner.open()
            self.buses.append(bus)
            self.runners.append(runner)
            self.tasks.append(asyncio.create_task(runner.run()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            await end(task)
        for runner in self.runners:
            await runner.close()

    @property
    def num_running(self) -> list[int]:
        return [runner.num_running for runner in self.runners]


class Slow(World):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def answer(self, call: Call, given: Body) -> None:
        await self.go.wait()
        await super().answer(call, given)


async def batches(world: World, count: int) -> list[BatchRecord]:
    first = await world.batch(5)
    records = [first]
    for number in range(2, count + 1):
        record = BatchRecord(
            batch_id=f"batch_{number}",
            owner=OWNER,
            key_id="",
            endpoint=URL,
            input_file_id=first.input_file_id,
            created_at=world.now + number,
            expires_at=first.expires_at,
            output_life_s=3600,
        )
        await world.store.create(record)
        records.append(record)
    return records


async def left_behind(world: World) -> None:
    """A batch whose router died when only its results were still to be purged."""
    over = BatchRecord(
        batch_id="batch_old",
        owner=OWNER,
        key_id="",
        endpoint=URL,
        input_file_id="",
        created_at=world.now,
        expires_at=int(world.now) + 1,
        output_life_s=3600,
        state=BatchState.COMPLETED,
        in_progress_at=int(world.now),
        completed_at=int(world.now),
    )
    await world.store.create(over)
    await world.journal.add(over.batch_id, LineResult(number=1, custom_id="c", status=200, body=b"{}"))


async def states(world: World) -> set[BatchState]:
    return {record.state for record in await world.store.all_of(OWNER)}


async def until_completed(world: World, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while await states(world) != {BatchState.COMPLETED}:  # noqa: ASYNC110 - the broker's state
            await asyncio.sleep(0.02)


async def test_routers_share_the_batches_and_each_is_run_once() -> None:
    world = Slow()
    await world.open()
    async with Routers(world, 2) as routers:
        await batches(world, 6)
        await until(lambda: sum(routers.num_running) == 4)
        await asyncio.sleep(0.5)
        assert sum(routers.num_running) == 4 and min(routers.num_running) >= 1
        world.go.set()
        await until_completed(world, 10.0)
        assert set(world.answered.values()) == {6} and len(world.keys) == 30
        await until(lambda: sum(routers.num_running) == 0)


async def test_more_batches_than_are_kept_in_mind_all_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_KNOWN", 4)
    monkeypatch.setattr(runner_module, "SWEEP_S", 0.05)
    swept: list[set[str]] = []
    world = Slow()
    await world.open()

    async def sweep(in_use: set[str]) -> int:
        swept.append(in_use)
        return 0

    monkeypatch.setattr(world.parts.library, "sweep", sweep)
    records = await batches(world, 12)
    async with Routers(world, 1) as routers:
        await until(lambda: routers.num_running == [4])
        await asyncio.sleep(0.3)
        assert not swept, "files of batches that are not known here must stay"
        world.go.set()
        await until_completed(world, 10.0)
        assert set(world.answered.values()) == {len(records)}
        await until(lambda: bool(swept))


async def test_a_router_that_is_cut_off_gives_up_and_another_goes_on() -> None:
    world = Slow()
    await world.open()
    async with Routers(world, 2) as routers:
        await batches(world, 1)
        await until(lambda: sum(routers.num_running) == 1)
        owner = routers.num_running.index(1)
        # No renewal of its leases comes through any more.
        routers.buses[owner]._is_closed = True
        await until(lambda: routers.num_running[owner] == 0 and routers.num_running[1 - owner] == 1, 10.0)
        world.go.set()
        await until_completed(world, 10.0)
        assert set(world.answered.values()) == {1}


async def test_a_batch_in_trouble_is_tried_again_and_hinders_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MIN_BACKOFF_S", 0.05)

    class Troubled(World):
        num_times = 0

        async def stored(self, owner: str, file_id: str, *, is_in_use: bool) -> object:
            self.num_times += 1
            if self.num_times < 4:
                raise BusUnavailable("not now") if self.num_times % 2 else RuntimeError("a fault")
            return await type(self.library).stored(self.library, owner, file_id, is_in_use=is_in_use)

    world = Troubled()
    await world.open()
    monkeypatch.setattr(world.library, "stored", world.stored)
    async with Routers(world, 1):
        await batches(world, 1)
        await until_completed(world, 10.0)
    assert (await world.record()).epoch == 4


async def test_a_batch_does_not_wait_long_for_a_broker_that_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it was away: with twice the pause each time it would take half a minute."""
    monkeypatch.setattr(runner_module, "MIN_BACKOFF_S", 0.05)
    monkeypatch.setattr(runner_module, "MAX_OUTAGE_BACKOFF_S", 0.1)
    num_times = 0
    world = await World().open()
    stored = world.library.stored

    async def unreachable(owner: str, file_id: str, *, is_in_use: bool = False) -> object:
        nonlocal num_times
        num_times += 1
        if num_times <= 9:
            raise BusUnavailable("not now")
        return await stored(owner, file_id, is_in_use=is_in_use)

    monkeypatch.setattr(world.library, "stored", unreachable)
    async with Routers(world, 1):
        await batches(world, 1)
        await until_completed(world, 20.0)
    assert (await world.record()).epoch == 10


async def test_batches_of_a_newer_version_are_left_to_it() -> None:
    world = await World().open()
    async with Routers(world, 1) as routers:
        await world.store.create(
            BatchRecord(
                batch_id="batch_9",
                owner=OWNER,
                key_id="",
                endpoint="/v9/new",
                input_file_id="",
                created_at=1.0,
                expires_at=2,
                output_life_s=3600,
            )
        )
        await asyncio.sleep(0.5)
        assert routers.num_running == [0] and await states(world) == {BatchState.VALIDATING}


async def test_one_router_tidies_up_and_nothing_runs_while_there_is_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "SWEEP_S", 0.3)
    world = await World().open()
    record = await world.batch(5)
    await left_behind(world)
    async with Routers(world, 2) as routers:
        async with asyncio.timeout(10.0):
            while not (await world.record()).is_over:  # noqa: ASYNC110 - the broker's state
                await asyncio.sleep(0.02)
        world.now += 40 * 86_400
        async with asyncio.timeout(10.0):
            while await world.bus.entries(FILES.name):  # noqa: ASYNC110 - the broker's state
                await asyncio.sleep(0.02)
        await until(lambda: all(runner._keeper is None for runner in routers.runners))
        assert await world.bus.num_messages(BATCH_RESULTS.name) == 0
    assert await world.library.all_of(owner_token(OWNER)) == [] and record.input_file_id
