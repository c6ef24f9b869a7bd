"""Stands for a worker. FAKE_WORKER: ok, refuse (exit code 2), crash (after a while, always), load (never ready) or
stubborn (ignores SIGTERM, as does its child)."""

import asyncio
import os
import signal
import sys

from headrace_shared.broker_permissions import Role
from headrace_shared.codec import encode
from headrace_shared.fleet_messages import Hello, WorkerState
from headrace_shared.messages import WorkerId
from headrace_shared.nats_bus import NatsBus
from headrace_shared.service import Service
from headrace_shared.subjects import hello_subject
from headrace_shared.telemetry import LOADING_CURRENT, LOADING_TOTAL

MODE = os.environ.get("FAKE_WORKER", "ok")


async def main() -> int:
    if MODE == "refuse":
        sys.stderr.write("some log line\nheadrace-worker: model: no file /nowhere.gguf; check --model\n")
        return 2
    if MODE == "crash":
        sys.stderr.write("the device is on fire\n")
        return 1
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        await asyncio.create_subprocess_exec("sleep", "300")
    environ = os.environ
    bus = await NatsBus.connect(
        environ["HEADRACE_NATS_URL"],
        name="fake",
        on_closed=stop.set,
        role=Role.WORKER,
        credentials=environ["HEADRACE_BROKER_CREDENTIALS"],
    )
    state = WorkerState.LOADING if MODE == "load" else WorkerState.READY
    model, worker = environ["HEADRACE_SERVED_NAME"], WorkerId(environ["HEADRACE_SERVICE_ID"])
    hello = Hello(
        worker=worker,
        model=model,
        state=state,
        epoch=0,
        num_blocks=64,
        block_size=16,
        context=1024,
        max_sequences=8,
        tokens_per_iteration=64,
        device="cpu",
        dtype="float32",
    )
    gauges = {LOADING_CURRENT: 25.0, LOADING_TOTAL: 100.0} if MODE == "load" else {}
    report = asyncio.create_task(Service("worker", worker).report(bus, lambda: str(state), lambda: gauges, model))
    while not stop.is_set():
        bus.publish(hello_subject(model, worker), encode(hello))
        try:
            async with asyncio.timeout(0.2):
                await stop.wait()
        except TimeoutError:
            continue
    report.cancel()
    await bus.close()
    return 0


sys.exit(asyncio.run(main()))
