"""What routing, queueing and scheduling cost as the fleet grows, with workers that only take a GPU's time.

    python -m benchmarks.control_plane [--fleets 1,10,30,100] [--seconds 10] [--concurrency 4,16,64,256]

Real broker, routers and schedulers; the workers are timing-model workers, many in each of `--hosts` processes. All of
them share this machine with the client, so what counts is the CPU time of each part, not the throughput of the whole:
the ceiling of a part is one core divided by what it needs for a token or a request. Prints one JSON object a line:

- `idle`: CPU of each part for each worker of an idle fleet (hellos, leases, telemetry, heartbeats), as the fleet grows;
- `load`: at a load that does not change with the fleet, CPU of each part for each token;
- `saturation`: with the largest fleet and more and more requests at a time, until tokens a second rise no more, what
  each part uses of a core then.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks import client
from benchmarks.workload import Job
from headrace_shared.broker import NatsServer
from headrace_shared.fleet_messages import WorkerState
from tests.integration.deployment import MODEL, Client, Deployment, until, until_status

PROMPT_TOKENS = 32
PARTS = ("nats", "router", "scheduler", "worker", "client")
SETTLE_S = 2.0


class System(NamedTuple):
    urls: list[str]
    pids: dict[str, list[int]]


class Usage(NamedTuple):
    """CPU seconds of each part."""

    cpu_s: dict[str, float]
    at: float

    @classmethod
    def now(cls, pids: dict[str, list[int]]) -> "Usage":
        used = {part: sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids[part]) for part in PARTS}
        return cls(used, time.monotonic())

    def since(self, before: "Usage") -> "Usage":
        used = {part: self.cpu_s[part] - before.cpu_s[part] for part in PARTS}
        return Usage(used, self.at - before.at)


@asynccontextmanager
async def started(options: argparse.Namespace, num_workers: int) -> AsyncIterator[System]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        server = NatsServer(directory / "nats")
        await server.start()
        deployment = Deployment(server, directory)
        try:
            async with Client.connect(server.url, hears_tokens=False) as bus_client:
                yield await _start(options, num_workers, server, deployment, bus_client)
        finally:
            await deployment.close()
            await server.stop()


async def _start(
    options: argparse.Namespace, num_workers: int, server: NatsServer, deployment: Deployment, bus_client: Client
) -> System:
    pids: dict[str, list[int]] = {"nats": [server.pid or 0], "client": [os.getpid()]}
    schedulers = [await deployment.scheduler(f"scheduler-{number}") for number in range(options.schedulers)]
    num_hosts = min(options.hosts, num_workers)
    hosts = [
        await deployment.simulated_workers(
            f"host-{number}",
            workers=num_workers // num_hosts + (number < num_workers % num_hosts),
            gpu=options.gpu,
            gpu_model=options.gpu_model,
            num_blocks=options.blocks,
            log_level="warning",
        )
        for number in range(num_hosts)
    ]
    urls = [await deployment.router(f"router-{number}") for number in range(options.routers)]
    pids["scheduler"] = [process.pid for process in schedulers]
    pids["worker"] = [process.pid for process in hosts]
    pids["router"] = [deployment.processes[f"router-{number}"].pid for number in range(options.routers)]

    def num_ready() -> int:
        seen = bus_client.telemetry.values()
        return sum(each.service == "worker" and each.state == WorkerState.READY for each in seen)

    def num_leased() -> float:
        return sum(bus_client.gauge(f"scheduler-{number}", "num_workers") or 0 for number in range(options.schedulers))

    await until(lambda: num_ready() == num_workers and num_leased() == num_workers, 600.0, "all workers leased")
    for url in urls:
        async with httpx.AsyncClient(base_url=url) as http:
            await until_status(http, "/health", 200, 60.0)
    return System(urls, pids)


async def idle(options: argparse.Namespace, system: System, num_workers: int) -> None:
    await asyncio.sleep(SETTLE_S)
    before = Usage.now(system.pids)
    await asyncio.sleep(options.seconds)
    used = Usage.now(system.pids).since(before)
    cores = {part: round(1e3 * used.cpu_s[part] / used.at, 2) for part in PARTS}
    control = sum(cores[part] for part in ("nats", "router", "scheduler"))
    _tell(
        "idle",
        workers=num_workers,
        thousandths_of_a_core=cores,
        control_plane_for_each_worker=round(control / num_workers, 3),
        worker_for_each_worker=round(cores["worker"] / num_workers, 3),
    )


async def load(options: argparse.Namespace, system: System, num_workers: int, kind: str, concurrency: int) -> float:
    """Returns tokens a second."""
    num_requests = max(concurrency, int(options.requests * concurrency))
    jobs = [
        Job([1000 + (number * 7919 + place * 31) % 40_000 for place in range(PROMPT_TOKENS)], options.tokens, 0.0)
        for number in range(num_requests)
    ]
    before = Usage.now(system.pids)
    shares = [jobs[number :: len(system.urls)] for number in range(len(system.urls))]
    addresses = [urlsplit(url) for url in system.urls]
    summaries = await asyncio.gather(
        *(
            client.run(str(each.hostname), int(each.port or 80), MODEL, share, max(1, concurrency // len(addresses)))
            for each, share in zip(addresses, shares, strict=True)
        )
    )
    used = Usage.now(system.pids).since(before)
    num_tokens = num_requests * options.tokens
    tokens_per_s: float = num_tokens / used.at
    _tell(
        kind,
        workers=num_workers,
        concurrency=concurrency,
        requests_per_s=round(num_requests / used.at, 1),
        tokens_per_s=round(tokens_per_s),
        complete=sum(each.num_complete for each in summaries),
        requests=num_requests,
        ttft_p50_ms=round(max(each.ttft_p50_ms for each in summaries), 1),
        us_per_token={part: round(1e6 * used.cpu_s[part] / num_tokens, 1) for part in PARTS},
        cores={part: round(used.cpu_s[part] / used.at, 2) for part in PARTS},
    )
    return tokens_per_s


async def run(options: argparse.Namespace) -> None:
    fleets = _numbers(options.fleets)
    for num_workers in fleets:
        async with started(options, num_workers) as system:
            await idle(options, system, num_workers)
            await load(options, system, num_workers, "load", options.load)
            if num_workers == fleets[-1]:
                await saturate(options, system, num_workers)


async def saturate(options: argparse.Namespace, system: System, num_workers: int) -> None:
    best = 0.0
    for concurrency in _numbers(options.concurrency):
        tokens_per_s = await load(options, system, num_workers, "saturation", concurrency)
        if tokens_per_s < 1.05 * best:
            return
        best = tokens_per_s


def _numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


def _tell(kind: str, **figures: object) -> None:
    sys.stdout.write(json.dumps({"kind": kind, **figures}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", default="1,10,30,100", help="numbers of workers, one after the other")
    parser.add_argument("--concurrency", default="16,64,256,512", help="requests at a time, for saturation")
    parser.add_argument("--load", type=int, default=16, help="requests at a time, for load")
    parser.add_argument("--requests", type=float, default=4.0, help="for each of those at a time")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--seconds", type=float, default=10.0, help="of idleness that are measured")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--schedulers", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=2, help="processes that the workers are dealt out to")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--gpu-model", default="llama-3.1-8b")
    parser.add_argument("--blocks", type=int, default=4096, help="KV blocks of each worker")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
