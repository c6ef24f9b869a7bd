"""What a scheduler records reaches the broker, and nothing about it harms the scheduler."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace_scheduler import recording
from headrace_scheduler.flight_log import FlightLog
from headrace_scheduler.replay import chunks, replay
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.errors import BusRefused
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import CancelReason, RequestId, SchedulerId
from headrace_shared.subjects import ALL_FLIGHTS, FLIGHT, StreamSpec
from tests.scheduler.shell_builders import until


@asynccontextmanager
async def running(log: FlightLog) -> AsyncIterator[None]:
    task = asyncio.create_task(log.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def stored(bus: MemoryBus) -> list[bytes]:
    return [message.data for message in await bus.read(FLIGHT.name, ALL_FLIGHTS, 1000)]


def act(core: Scheduler, number: int) -> None:
    core.cancel(RequestId(f"{number:032x}"), None, CancelReason.CLIENT, float(number))
    core.schedule(float(number))


async def test_events_reach_the_broker_in_parts_and_replay() -> None:
    bus = MemoryBus(MemoryBroker(max_payload=4096))
    log = FlightLog(bus, SchedulerId("scheduler-1"), lambda: 0.0)
    core = Scheduler()
    log.attach(core)
    act(core, 1)
    await log.open()  # what was before is not recorded
    for number in range(2, 300):
        act(core, number)
    log.close()
    messages = await stored(bus)
    assert len(messages) > 2
    moments = list(replay(chunks(messages)))
    assert len(moments) == 2 * 298 and all(moment.is_same for moment in moments)


async def test_after_a_reconnect_the_recording_starts_anew() -> None:
    bus = MemoryBus()
    log = FlightLog(bus, SchedulerId("scheduler-1"), lambda: 0.0)
    core = Scheduler()
    log.attach(core)
    await log.open()
    act(core, 1)
    await log.open()
    act(core, 2)
    log.close()
    (message,) = await stored(bus)
    assert [moment.arguments[-1] for moment in replay(chunks([message]))] == [2.0, 2.0]


async def test_a_broker_without_room_is_no_reason_not_to_serve() -> None:
    class Full(MemoryBus):
        async def ensure_stream(self, spec: StreamSpec) -> None:
            raise BusRefused("insufficient memory")

    log = FlightLog(Full(), SchedulerId("scheduler-1"), lambda: 0.0)
    core = Scheduler()
    await log.open()
    log.attach(core)
    act(core, 1)
    assert core.observer is None
    log.close()


async def test_a_state_that_is_too_large_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_STATE_BYTES", 10)
    bus = MemoryBus()
    log = FlightLog(bus, SchedulerId("scheduler-1"), lambda: 0.0)
    core = Scheduler()
    log.attach(core)
    await log.open()
    act(core, 1)
    log.close()
    assert core.observer is None and await stored(bus) == []


async def test_a_large_chunk_goes_out_bit_by_bit() -> None:
    now = 0.0
    bus = MemoryBus(MemoryBroker(max_payload=2048))
    log = FlightLog(bus, SchedulerId("scheduler-1"), lambda: now)
    core = Scheduler()
    log.attach(core)
    await log.open()
    for number in range(200):
        act(core, number)
    async with running(log):
        await asyncio.sleep(0.01)  # it looks at the clock
        now = 10.0
        seen: set[int] = set()

        async def count() -> int:
            seen.add(len(await stored(bus)))
            return max(seen)

        for _ in range(3000):
            if await count() >= 5:
                break
            await asyncio.sleep(0.02)
        assert len(seen) > 2, seen
        await until(lambda: not log._unsent)
    assert all(moment.is_same for moment in replay(chunks(await stored(bus))))
