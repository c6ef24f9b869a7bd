"""CPU time of a scheduler process for each generated token.

    python -m benchmarks.scheduler_cpu [--sequences 256] [--workers 1] [--tokens 512] [--step-ms 10] [--profile FILE]

Real broker, real scheduler process, scripted workers that keep `--sequences` sequences running each. Prints one JSON
object. `steady` is measured while all run; `whole` includes admissions, endings, heartbeats and renewals. With
`--profile` the scheduler runs under cProfile, which makes the figures meaningless and the profile useful.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from headrace_shared.broker import NatsServer
from tests.integration.deployment import Client, Deployment, ended, until

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def engine_pid(worker_pid: int) -> int:
    return int(Path(f"/proc/{worker_pid}/task/{worker_pid}/children").read_text().split()[0])


async def measure(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    server = NatsServer(directory / "nats", sync_interval="100ms")
    await server.start()
    deployment = Deployment(server, directory)
    try:
        async with Client.connect(server.url, hears_tokens=False) as client:
            return await run(options, deployment, client)
    finally:
        await deployment.close()
        await server.stop()


async def run(options: argparse.Namespace, deployment: Deployment, client: Client) -> dict[str, float]:
    num_requests = options.sequences * options.workers
    scheduler = await deployment.scheduler(
        max_waiting=num_requests, launcher=["cProfile", "-o", options.profile] if options.profile else []
    )
    workers = [f"worker-{number}" for number in range(options.workers)]
    blocks_each = -(-(options.prompt + options.tokens) // 16) + 1
    pids: list[int] = []
    for worker in workers:
        process = await deployment.worker(
            worker,
            step_s=options.step_ms / 1000,
            checks=False,
            max_sequences=options.sequences,
            tokens_per_iteration=4 * options.sequences,
            num_blocks=blocks_each * options.sequences,
        )
        pids.append(process.pid)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == options.workers, what="adoption")
    engines = [engine_pid(pid) for pid in pids]
    io_cpu, engine_cpu = sum(map(cpu_s, pids)), sum(map(cpu_s, engines))
    started_at, cpu_before = time.monotonic(), cpu_s(scheduler.pid)
    requests = [
        await client.submit([number % 4000, *range(options.prompt - 1)], max_tokens=options.tokens, seed=number)
        for number in range(num_requests)
    ]
    await until(lambda: client.gauge("scheduler-1", "num_running") == num_requests, 60.0, "all running")
    steady_cpu, steady_tokens = cpu_s(scheduler.pid), tokens_so_far(client, workers)
    steady_at = time.monotonic()
    enough = 0.8 * num_requests * options.tokens
    await until(lambda: tokens_so_far(client, workers) >= enough, 300.0, "most tokens")
    steady_cpu, steady_tokens = cpu_s(scheduler.pid) - steady_cpu, tokens_so_far(client, workers) - steady_tokens
    steady_s = time.monotonic() - steady_at
    await ended(*requests, timeout_s=300.0)
    whole_cpu = cpu_s(scheduler.pid) - cpu_before
    num_tokens = num_requests * options.tokens
    if options.profile:
        await deployment.stop("scheduler-1")
    return {
        "sequences": num_requests,
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / (time.monotonic() - started_at)),
        "steady_tokens_per_s": round(steady_tokens / steady_s),
        "steady_us_per_token": round(steady_cpu / steady_tokens * 1e6, 2),
        "whole_us_per_token": round(whole_cpu / num_tokens * 1e6, 2),
        "worker_io_us_per_token": round((sum(map(cpu_s, pids)) - io_cpu) / num_tokens * 1e6, 2),
        "engine_process_us_per_token": round((sum(map(cpu_s, engines)) - engine_cpu) / num_tokens * 1e6, 2),
    }


def tokens_so_far(client: Client, workers: list[str]) -> float:
    """By telemetry, which is up to a second old."""
    return sum(client.gauge(worker, "num_output_tokens") or 0.0 for worker in workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256, help="running sequences of each worker")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--step-ms", type=float, default=10.0, help="duration of an iteration")
    parser.add_argument("--profile", default="", help="write a cProfile of the scheduler to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = asyncio.run(measure(options, Path(directory)))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
