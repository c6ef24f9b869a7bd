"""What a warm pool buys: a parked worker's promotion against a cold start, and what it occupies meanwhile.

    python -m benchmarks.promotion [--rounds 10] [--model smollm2-135m]

Real broker, scheduler and worker processes on this machine, with a request that waits in the queue each time. Prints
medians (and the slowest) in seconds, and resident memory of the worker's processes: ready after work, and parked.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from headrace_shared.broker import NatsServer
from headrace_shared.bus import Message
from headrace_shared.codec import decode
from headrace_shared.fleet_messages import CommandKind, Hello, WorkerState
from headrace_shared.subjects import ALL_HELLOS
from tests.integration.deployment import MODEL, Client, Deployment, Heard, ended, until

PROMPT = list(range(1000, 1128))
WORKER = "worker-1"


class Watch:
    """When each state was first said since `reset`."""

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.seen: dict[str, float] = {}

    def reset(self) -> float:
        self.seen.clear()
        return time.monotonic()

    def on_hello(self, message: Message) -> None:
        self.hello = decode(message.data, Hello)
        now = time.monotonic()
        self.seen.setdefault(self.hello.state, now)
        if self.hello.state is WorkerState.READY and self.hello.epoch:
            self.seen.setdefault("leased", now)


async def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder) / "nats", sync_interval="100ms")
        await server.start()
        deployment = Deployment(server, Path(folder))
        try:
            async with Client.connect(server.url) as client:
                await _measure(options, deployment, client, figures)
        finally:
            await deployment.close()
            await server.stop()
    return figures


async def _measure(
    options: argparse.Namespace, deployment: Deployment, client: Client, figures: dict[str, list[float]]
) -> None:
    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    watch = Watch()
    await client.bus.subscribe(ALL_HELLOS, watch.on_hello)
    await deployment.scheduler()
    waiting = await client.submit(PROMPT, max_tokens=8)
    asked_at = watch.reset()
    process = await deployment.worker(
        WORKER, model=options.model, served_name=MODEL, engine="headrace_worker.engine_process"
    )
    first_at = await _first_token(waiting)
    note("cold start to ready", watch.seen[WorkerState.READY] - asked_at)
    note("cold start to the first token of a waiting request", first_at - asked_at)
    await ended(waiting)
    for number in range(options.rounds):
        requests = [await client.submit([number, seed, *PROMPT * 3], max_tokens=64, seed=seed) for seed in range(8)]
        await ended(*requests, timeout_s=120.0)
        note("resident MiB, ready after work", resident_mib(process.pid))
        asked_at = watch.reset()
        assert (await client.command(WORKER, CommandKind.PARK)).is_accepted
        await _until(lambda: WorkerState.PARKED in watch.seen)
        note("park an idle worker", watch.seen[WorkerState.PARKED] - asked_at)
        waiting = await client.submit([number, *PROMPT], max_tokens=8)
        await asyncio.sleep(1.5)
        assert not waiting.outputs, "a parked worker has answered"
        note("resident MiB, parked", resident_mib(process.pid))
        asked_at = watch.reset()
        assert (await client.command(WORKER, CommandKind.PROMOTE)).is_accepted
        first_at = await _first_token(waiting)
        note("promotion to ready", watch.seen[WorkerState.READY] - asked_at)
        note("promotion to a scheduler's lease", watch.seen["leased"] - asked_at)
        note("promotion to the first token of a waiting request", first_at - asked_at)
        await ended(waiting)


async def _first_token(heard: Heard) -> float:
    await _until(lambda: heard.outputs.get(0))
    return time.monotonic()


async def _until(condition: Callable[[], object]) -> None:
    await until(condition, timeout_s=120.0)


def resident_mib(pid: int) -> float:
    """Of the process and its children."""
    process = psutil.Process(pid)
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True))) / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="smollm2-135m")
    figures = asyncio.run(measure(parser.parse_args()))
    for name, values in figures.items():
        sys.stdout.write(f"{name:52} median {statistics.median(values):8.3f}   slowest {max(values):8.3f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
