"""Requests end when nobody waits for them any more, or their time is up; silence of ours is not theirs."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from headrace_scheduler.audience import Listeners
from headrace_scheduler.broker_clock import BrokerClock
from headrace_scheduler.lifetimes import Lifetimes
from headrace_shared import codec
from headrace_shared.bus import Delivery
from headrace_shared.fleet_messages import Telemetry
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import Attached, Audience, CancelReason, Request, RequestId, RouterId
from headrace_shared.subjects import attached_subject, telemetry_subject
from tests.scheduler.shell_builders import prepare, request, until

ROUTER = RouterId("router-1")
ORDINARY = replace(request(1), audience=Audience.ROUTER)
RESUMABLE = replace(request(2), audience=Audience.ATTACHED)
BACKGROUND = request(3)


def test_silence_tells_unless_it_is_ours() -> None:
    listeners = Listeners(8.0, 100.0)

    def forsaken(now: float, queued_at: float = 50.0) -> list[int]:
        all_requests = (ORDINARY, RESUMABLE, BACKGROUND)
        return [n for n, each in enumerate(all_requests) if listeners.is_forsaken(each, queued_at, now)]

    assert forsaken(108.0) == [], "we have not listened for long enough"
    assert forsaken(108.1) == [0, 1]
    assert forsaken(108.1, queued_at=100.2) == [], "whoever queued it was there"
    listeners.on_router(ROUTER, 108.0)
    assert forsaken(110.0) == [1], "its router lives, but nobody has its client"
    listeners.on_attached([RESUMABLE.request_id], 109.0)
    assert forsaken(116.0) == [] and forsaken(116.5) == [0] and forsaken(117.5) == [0, 1]
    listeners.begin(120.0)
    assert forsaken(128.0) == []
    listeners.prune(128.0)
    assert forsaken(128.5) == [0, 1]


class SteppingBus(MemoryBus):
    time = 1000.0

    async def clock(self, stream: str) -> float:
        return self.time


async def test_a_step_of_the_brokers_clock_makes_nothing_old() -> None:
    bus, now = SteppingBus(), 0.0
    clock = BrokerClock(bus, "REQUESTS", lambda: now, lambda: 1000.0)
    assert clock.age_s(900.0) == 0.0 and clock.now() == float("-inf")
    await clock.measure()
    assert clock.age_s(900.0) == pytest.approx(100.0) and clock.age_s(1100.0) == 0.0
    now, bus.time = 10.0, 1010.5  # drift
    assert await clock.sure_age_s(900.0) == pytest.approx(110.5)
    now, bus.time = 20.0, 4620.0  # an hour ahead
    assert clock.age_s(900.0) == pytest.approx(120.5), "not noticed yet"
    assert await clock.sure_age_s(900.0) == 0.0
    now = 30.0
    assert clock.age_s(4620.0) == pytest.approx(10.0)
    bus.time = 1030.0  # and back
    assert await clock.sure_age_s(1030.0) == pytest.approx(0.0)


@pytest.mark.parametrize("apart_s", [3600.0, -3600.0])
async def test_whoever_starts_after_a_step_of_the_brokers_clock_takes_nothing_for_old(apart_s: float) -> None:
    """It has seen no step, but the broker's clock is far from its own host's."""
    bus, now = SteppingBus(), 0.0
    clock = BrokerClock(bus, "REQUESTS", lambda: now, lambda: bus.time - apart_s)
    assert await clock.sure_age_s(bus.time - 3500.0) == 0.0
    stored, now, bus.time = bus.time, 100.0, bus.time + 100.0
    assert await clock.sure_age_s(stored) == pytest.approx(100.0)


class Bench:
    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.routers = MemoryBus(self.bus.broker)
        self.skip_s = 0.0
        self.held: list[RequestId] = []
        self.cancelled: list[tuple[RequestId, CancelReason]] = []
        self.lifetimes = Lifetimes(
            self.bus,
            BrokerClock(self.bus, "REQUESTS", self.clock),
            1.0,
            cancel=self.cancel,
            held=lambda: self.held,
            clock=self.clock,
        )

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self.skip_s

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self.cancelled.append((request_id, reason))
        self.held.remove(request_id)

    def take(self, *requests: Request) -> None:
        for each in requests:
            self.held.append(each.request_id)
            self.lifetimes.on_taken(each, None)

    async def say(self, seconds: float) -> None:
        """The router lives, and has the resumable one's client."""
        for _ in range(round(seconds / 0.2)):
            telemetry = Telemetry(service="router", id=ROUTER, state="ready")
            self.routers.publish(telemetry_subject("router", ROUTER), codec.encode(telemetry))
            attached = Attached(request_ids=(RESUMABLE.request_id,))
            self.routers.publish(attached_subject(RouterId("router-2")), codec.encode(attached))
            await asyncio.sleep(0.2)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await prepare(bench.bus)
    await bench.lifetimes.open()
    task = asyncio.create_task(bench.lifetimes.run())
    yield bench
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_death_of_a_router_ends_what_it_leaves(bench: Bench) -> None:
    bench.take(ORDINARY, RESUMABLE, BACKGROUND)
    for rubbish in (telemetry_subject("router", "x"), attached_subject(RouterId("x"))):
        bench.routers.publish(rubbish, b"\xc1")
    await bench.say(1.6)
    assert bench.cancelled == []
    await until(lambda: len(bench.cancelled) == 2)
    assert sorted(bench.cancelled) == [(each.request_id, CancelReason.CLIENT) for each in (ORDINARY, RESUMABLE)]
    assert bench.held == [BACKGROUND.request_id]


async def test_time_that_is_up_ends_even_what_runs_in_the_background(bench: Bench) -> None:
    bench.take(replace(BACKGROUND, timeout_s=0.3))
    await until(lambda: bench.cancelled == [(BACKGROUND.request_id, CancelReason.DEADLINE)], 2.0)


async def test_a_scheduler_that_takes_over_gives_no_time_anew(bench: Bench) -> None:
    published_at = await bench.bus.clock("REQUESTS") - 100.0
    bench.held.append(BACKGROUND.request_id)
    bench.lifetimes.on_taken(replace(BACKGROUND, timeout_s=90.0), published_at)
    await until(lambda: bench.cancelled == [(BACKGROUND.request_id, CancelReason.DEADLINE)], 2.0)


async def test_a_step_of_the_brokers_clock_ends_nothing_that_is_taken_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has looked at the clock since: what was stored then seems to be an hour old."""
    asked = 0

    async def stepped(stream: str) -> float:
        nonlocal asked
        asked += 1
        return time.time() - 3600.0

    monkeypatch.setattr(bench.bus, "clock", stepped)
    wanted = replace(BACKGROUND, timeout_s=90.0)
    bench.held.append(wanted.request_id)
    bench.lifetimes.on_taken(wanted, time.time() - 3600.0)
    await until(lambda: asked, 2.0)
    await asyncio.sleep(0.6)
    assert bench.cancelled == [] and asked == 1


async def test_after_a_freeze_everybody_gets_the_time_again(bench: Bench) -> None:
    bench.take(ORDINARY)
    bench.skip_s += 30.0
    delivery = Delivery("", b"", "", 1, 1, await bench.bus.clock("REQUESTS") - 100.0)
    assert await bench.lifetimes.verdict(RESUMABLE, delivery) is None
    await asyncio.sleep(0.7)
    assert bench.cancelled == []
    await until(lambda: bool(bench.cancelled), 2.0)


async def test_an_outage_of_the_broker_forsakes_nobody(bench: Bench) -> None:
    bench.take(ORDINARY)
    bench.bus.broker.stop()
    await asyncio.sleep(1.3)
    bench.bus.broker.start()
    await bench.say(0.6)
    assert bench.cancelled == []
