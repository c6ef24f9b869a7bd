"""The shell on a bus: what it hears, reads and says."""

import asyncio
import json
import signal
import subprocess
import sys

import pytest

from headrace_autoscaler.policy import Limits
from headrace_autoscaler.service import Autoscaler
from headrace_autoscaler.settings import AutoscalerSettings
from headrace_shared.broker import NatsServer
from headrace_shared.bus import Bus
from headrace_shared.codec import decode, encode
from headrace_shared.errors import ConfigError
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import Lane, Telemetry, WorkerId, WorkerState
from headrace_shared.nats_bus import NatsBus
from headrace_shared.service import Service
from headrace_shared.subjects import (
    ALL_TELEMETRY,
    hello_subject,
    request_subject,
    requests_consumer,
    requests_stream,
    telemetry_subject,
)
from tests.autoscaler.test_fleet import hello

LIMITS = Limits(1, 4, target_load=1.0)


async def prepare(bus: Bus, num_requests: int) -> None:
    """A queue with requests, one worker for eight sequences that runs three."""
    await bus.ensure_stream(requests_stream(1000, 1 << 20))
    for lane in Lane:
        await bus.ensure_consumer(requests_consumer("tiny", lane))
    for number in range(num_requests):
        await bus.enqueue(request_subject("tiny", Lane.INTERACTIVE, 0), b"x", message_id=f"m{number}")


def say(bus: Bus) -> None:
    worker = WorkerId("worker-1")
    bus.publish(hello_subject("tiny", worker), encode(hello(worker, state=WorkerState.READY)))
    figures = Telemetry(service="worker", id=worker, state="ready", gauges={"num_running": 3.0})
    bus.publish(telemetry_subject("worker", worker), encode(figures))


async def test_reports_what_it_would_do() -> None:
    bus, service = MemoryBus(), Service("autoscaler", "autoscaler-1")
    await prepare(bus, num_requests=14)
    autoscaler = Autoscaler(bus, LIMITS, period_s=0.02)
    heard: list[Telemetry] = []
    await bus.subscribe(ALL_TELEMETRY, lambda message: heard.append(decode(message.data, Telemetry)))
    run = asyncio.create_task(service.run(autoscaler.run, drain_timeout_s=1))
    await asyncio.sleep(0.05)
    bus.publish(hello_subject("tiny", WorkerId("worker-1")), b"garbage")
    bus.publish(telemetry_subject("worker", "worker-1"), b"garbage")
    say(bus)
    await asyncio.sleep(1.2)
    assert service.not_ready() is None
    assert autoscaler.decisions["tiny"].desired == 3
    assert autoscaler.decisions["tiny"].reason.startswith("17 requests (14 waiting), 8 at a time on a worker")
    own = [each for each in heard if each.id == "autoscaler-1"]
    assert own[-1].state == "ready" and own[-1].gauges["desired_workers:tiny"] == 3.0
    service.drain()
    assert await asyncio.wait_for(run, 2) == 0


async def test_a_queue_that_does_not_exist_yet_is_empty() -> None:
    bus, service = MemoryBus(), Service("autoscaler")
    autoscaler = Autoscaler(bus, LIMITS, period_s=3600)
    run = asyncio.create_task(service.run(autoscaler.run, drain_timeout_s=1))
    await asyncio.sleep(0.05)
    say(bus)
    await asyncio.sleep(0.05)
    await autoscaler.decide_once()
    assert autoscaler.decisions["tiny"].desired == 1
    service.drain()
    await run


async def test_a_queue_that_cannot_be_read_decides_nothing() -> None:
    bus, service = MemoryBus(), Service("autoscaler")
    await prepare(bus, num_requests=14)
    autoscaler = Autoscaler(bus, LIMITS, period_s=3600)
    run = asyncio.create_task(service.run(autoscaler.run, drain_timeout_s=1))
    await asyncio.sleep(0.05)
    say(bus)
    await asyncio.sleep(0.05)
    await autoscaler.decide_once()
    bus.broker.stop()
    await autoscaler.decide_once()
    assert autoscaler.decisions["tiny"].reason.startswith("17 requests (14 waiting), 8 at a time on a worker")
    service.drain()
    await run


def test_contradicting_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_workers: 9 exceeds max_workers, which is 8"):
        AutoscalerSettings(min_workers=9).limits()


@pytest.mark.nats
async def test_the_process_decides_and_drains(nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(nats_server.url, name="test", on_closed=lambda: None)
    await prepare(bus, num_requests=14)
    heard: asyncio.Queue[Telemetry] = asyncio.Queue()
    await bus.subscribe(ALL_TELEMETRY, lambda message: heard.put_nowait(decode(message.data, Telemetry)))
    command = [sys.executable, "-m", "headrace_autoscaler", "--nats-url", nats_server.url, "--period-s", "0.2"]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    try:
        async with asyncio.timeout(20):
            while (figures := await heard.get()).gauges.get("desired_workers:tiny") != 3.0:
                if figures.service == "autoscaler":
                    say(bus)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 10)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await bus.close()
    assert process.returncode == 0
    decisions = [event for line in errors.splitlines() if (event := json.loads(line))["event"] == "decision"]
    assert decisions[-1]["desired"] == 3 and decisions[-1]["workers"] == 1
