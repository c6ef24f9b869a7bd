"""The shell on a bus: what it hears, reads, says and does."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from headrace_autoscaler.service import Autoscaler
from headrace_autoscaler.settings import AutoscalerSettings
from headrace_shared.broker import NatsServer
from headrace_shared.bus import Bus
from headrace_shared.codec import decode, encode
from headrace_shared.errors import ConfigError
from headrace_shared.fleet_messages import Telemetry, WorkerState
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import WorkerId
from headrace_shared.nats_bus import NatsBus
from headrace_shared.service import Service
from headrace_shared.subjects import ALL_TELEMETRY, hello_subject
from tests.autoscaler.bench import LIMITS, PLANS, ask, prepare, running, take, until
from tests.autoscaler.heard import hello
from tests.autoscaler.talking_engine import TalkingEngine


async def answer_all(bus: Bus) -> None:
    while (delivery := await take(bus)) is not None:
        await bus.acknowledge(delivery.ack_subject)


@contextlib.asynccontextmanager
async def engine_on(bus: Bus, load_s: float = 0.2, start_s: float = 0.0) -> AsyncIterator[TalkingEngine]:
    engine = TalkingEngine(bus, load_s=load_s, start_s=start_s)
    try:
        yield engine
    finally:
        await engine.close()


class Gauges:
    """The latest figures of each autoscaler."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, float]] = {}

    async def follow(self, bus: Bus) -> None:
        await bus.subscribe(ALL_TELEMETRY, lambda message: self._on(decode(message.data, Telemetry)))

    def _on(self, figures: Telemetry) -> None:
        if figures.service == "autoscaler":
            self.of[figures.id] = figures.gauges


async def test_without_a_driver_it_says_what_it_would_do_and_nobody_may_count_on_it() -> None:
    bus = MemoryBus()
    await prepare(bus)
    await ask(bus, 14)
    worker = WorkerId("worker-1")
    gauges = Gauges()
    await gauges.follow(bus)
    async with running(bus, PLANS, None) as autoscaler:
        bus.publish(hello_subject("tiny", worker), b"garbage")

        def is_decided() -> bool:
            bus.publish(hello_subject("tiny", worker), encode(hello(worker)))
            return bool(autoscaler.decisions) and autoscaler.decisions["tiny"].desired == 2

        await until(is_decided)
        await until(lambda: gauges.of.get("a1", {}).get("desired_workers:tiny") == 2.0)
        assert gauges.of["a1"]["is_leader"] == 1.0
        assert not any(name.startswith(("max_workers", "coming")) for name in gauges.of["a1"])


async def test_a_queue_that_does_not_exist_yet_is_empty() -> None:
    bus = MemoryBus()
    async with running(bus, PLANS, None) as autoscaler:
        await until(lambda: bool(autoscaler.decisions))
        assert autoscaler.decisions["tiny"].desired == 1 and not autoscaler.decisions["tiny"].is_frozen


async def test_work_brings_workers_and_calm_takes_them_away_to_the_last() -> None:
    bus = MemoryBus()
    await prepare(bus)
    gauges = Gauges()
    await gauges.follow(bus)
    async with engine_on(bus) as engine, running(bus, PLANS._replace(limits=LIMITS._replace(min_workers=0)), engine):
        await until(lambda: "max_workers:tiny" in gauges.of.get("a1", {}))
        assert gauges.of["a1"]["max_workers:tiny"] == 4.0 and engine.workers == {}
        await ask(bus, 20)
        await until(lambda: engine.num_ready == 3)
        assert len(engine.workers) == 3
        await answer_all(bus)
        await until(lambda: engine.workers == {})
        assert {generation for generation, _ in engine.starts} == {1}
        await ask(bus, 1)
        assert await take(bus) is not None
        await until(lambda: engine.num_ready == 1)  # also for what was delivered once and is not acknowledged


async def test_workers_that_compute_are_drained_and_not_stopped() -> None:
    bus = MemoryBus()
    await prepare(bus)
    async with engine_on(bus) as engine, running(bus, PLANS, engine):
        await ask(bus, 16)
        await until(lambda: engine.num_ready == 2)
        await answer_all(bus)
        for worker in engine.workers.values():
            worker.num_running = 1
        await until(lambda: any(each.state is WorkerState.DRAINING for each in engine.workers.values()))
        await asyncio.sleep(0.5)
        assert len(engine.workers) == 2
        for worker in engine.workers.values():
            worker.num_running = 0
        await until(lambda: len(engine.workers) == 1)
        assert engine.num_ready == 1


async def test_after_the_broker_has_forgotten_the_epochs_workers_are_led_again() -> None:
    bus = MemoryBus()
    await prepare(bus)
    async with engine_on(bus) as engine, running(bus, PLANS, engine):
        await ask(bus, 16)
        await until(lambda: engine.num_ready == 2)
        for worker in engine.workers.values():
            worker.command_epoch = 9  # of a leader of former times: they obey no lower one
        await answer_all(bus)
        await until(lambda: len(engine.workers) == 1)
        assert max(generation for generation, _ in engine.starts) == 1 and engine.num_ready == 1


async def test_an_engine_that_does_not_answer_changes_nothing_and_is_asked_again() -> None:
    bus = MemoryBus()
    await prepare(bus)
    gauges = Gauges()
    await gauges.follow(bus)
    async with engine_on(bus) as engine, running(bus, PLANS, engine) as autoscaler:
        engine.problem = "no such socket"
        await ask(bus, 16)
        await until(lambda: bool(autoscaler.decisions) and autoscaler.decisions["tiny"].desired == 1)
        await until(lambda: "max_workers:tiny" not in gauges.of.get("a1", {"max_workers:tiny": 0.0}))
        assert engine.workers == {}
        engine.problem = ""
        await until(lambda: engine.num_ready == 2)


async def test_a_queue_that_cannot_be_read_takes_no_worker_away() -> None:
    bus = MemoryBus()
    await prepare(bus)
    async with engine_on(bus) as engine, running(bus, PLANS, engine) as autoscaler:
        await ask(bus, 16)
        await until(lambda: engine.num_ready == 2)
        await answer_all(bus)
        bus.broker.stop()
        await asyncio.sleep(2 * LIMITS.scale_down_after_s)
        assert len(engine.workers) == 2
        bus.broker.start()
        await until(lambda: len(engine.workers) == 1)
        assert autoscaler.decisions["tiny"].desired == 1


def test_contradicting_settings_are_refused() -> None:
    for settings, problem in (
        (AutoscalerSettings(min_workers=9), "min_workers: 9 exceeds max_workers, which is 8"),
        (AutoscalerSettings(min_parked=1), "min_parked: 1 exceeds max_parked, which is 0"),
        (AutoscalerSettings(max_cost_per_hour=3, cost_per_worker_hour=4), "max_cost_per_hour: 3 does not pay"),
    ):
        with pytest.raises(ConfigError, match=problem):
            settings.plans()


@pytest.mark.nats
async def test_of_two_exactly_one_acts_and_when_it_dies_the_other_goes_on(nats_server: NatsServer) -> None:
    async def connect(name: str) -> NatsBus:
        return await NatsBus.connect(nats_server.url, name=name, on_closed=lambda: None)

    shared, first, second = [await connect(name) for name in ("engine", "a1", "a2")]
    await prepare(shared)
    gauges = Gauges()
    await gauges.follow(shared)
    plans = PLANS._replace(limits=LIMITS._replace(scale_down_after_s=60.0))
    async with engine_on(shared, start_s=0.5) as engine, running(second, plans, engine, "a2") as heir:
        await until(lambda: heir.is_leader)
        await until(lambda: engine.num_ready == 1)
        leader = Autoscaler(Service("autoscaler", "a1"), first, plans, engine)
        # The first to come leads; let it die between the creation and the start of what it starts.
        async with running(first, plans, engine, "a1") as follower:
            await ask(shared, 24)
            await until(lambda: engine.num_ready == 3)
            assert not follower.is_leader and leader.decisions == {}
            assert {generation for generation, _ in engine.starts} == {1} and len(engine.starts) == 3
            await until(lambda: gauges.of.get("a1", {}).get("is_leader") == 0.0)
            assert "desired_workers:tiny" not in gauges.of["a1"]
            await ask(shared, 8)
            await until(lambda: len(engine.workers) == 4)
            await second.close()  # cut off in the middle of a start
            await until(lambda: follower.is_leader)
            await until(lambda: engine.num_ready == 4)
            await asyncio.sleep(1.0)
            assert len(engine.workers) == 4
    for bus in (shared, first):
        await bus.close()


@pytest.mark.nats
async def test_the_process_decides_and_drains(nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(nats_server.url, name="test", on_closed=lambda: None)
    await prepare(bus)
    await ask(bus, 14)
    heard: asyncio.Queue[Telemetry] = asyncio.Queue()
    await bus.subscribe(ALL_TELEMETRY, lambda message: heard.put_nowait(decode(message.data, Telemetry)))
    command = [sys.executable, "-m", "headrace_autoscaler", "--nats-url", nats_server.url, "--period-s", "0.2"]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    worker = WorkerId("worker-1")
    try:
        async with asyncio.timeout(30):
            while (figures := await heard.get()).gauges.get("desired_workers:tiny") != 2.0:
                if figures.service == "autoscaler":
                    bus.publish(hello_subject("tiny", worker), encode(hello(worker)))
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 10)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await bus.close()
    assert process.returncode == 0
    decisions = [event for line in errors.splitlines() if (event := json.loads(line))["event"] == "decision"]
    assert decisions[-1]["desired"] == 2 and decisions[-1]["workers"] == 1
