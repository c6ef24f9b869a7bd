"""What a slow or stopped scheduler costs the worker: throughput with 100 ms injected between the two against none.

    python -m benchmarks.latency [--delay-ms 100] [--sequences 32] [--tokens 128] [--step-ms 20]

Real broker, real scheduler and worker processes; the scheduler's connection runs through a proxy that holds everything
for the delay, in each direction. The engine is scripted, with a fixed time for an iteration: nothing hides a lost one.
A third run freezes the scheduler (SIGSTOP) for one second in the middle. Prints one line a run.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from headrace_shared.broker import NatsServer
from tests.chaos_proxy import ChaosProxy
from tests.integration.deployment import Client, Deployment, ended, until

ROUNDS = 16
"""Requests for each place in the batch: so many that what begins and ends later, by the delay, weighs little."""


async def measure(options: argparse.Namespace, *, delay_s: float, pause_s: float) -> float:
    """Output tokens per second, from the first request's submission to the last one's end."""
    with tempfile.TemporaryDirectory() as directory:
        server = NatsServer(Path(directory) / "nats", sync_interval="100ms")
        await server.start()
        deployment = Deployment(server, Path(directory))
        try:
            async with ChaosProxy(server.port) as proxy, Client.connect(server.url, hears_tokens=False) as client:
                return await _run(options, deployment, client, proxy, delay_s, pause_s)
        finally:
            await deployment.close()
            await server.stop()


async def _run(
    options: argparse.Namespace,
    deployment: Deployment,
    client: Client,
    proxy: ChaosProxy,
    delay_s: float,
    pause_s: float,
) -> float:
    await deployment.scheduler(nats_url=f"nats://127.0.0.1:{proxy.port}")
    await deployment.worker(
        step_s=options.step_ms / 1000,
        checks=False,
        max_sequences=options.sequences,
        tokens_per_iteration=4 * options.sequences,
        num_blocks=options.sequences * (-(-(options.tokens + 64) // 16) + 2) * 2,
    )
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 1, what="adoption")
    proxy.delay_s = delay_s
    await asyncio.sleep(2.0)  # the delay is in force for leases and heartbeats too
    num_requests = ROUNDS * options.sequences
    started = time.monotonic()
    # Different lengths, as in life: otherwise all places would fall free in the same iteration.
    lengths: list[int] = [
        options.tokens // 2 + number * options.tokens // num_requests for number in range(num_requests)
    ]
    requests = [
        await client.submit([number, *range(4000, 4031)], max_tokens=length, seed=number)
        for number, length in enumerate(sorted(lengths, key=lambda length: length * 7919 % 104729))
    ]
    if pause_s:
        await asyncio.sleep(2.0)
        deployment.signal("scheduler-1", signal.SIGSTOP)
        await asyncio.sleep(pause_s)
        deployment.signal("scheduler-1", signal.SIGCONT)
    await ended(*requests, timeout_s=300.0)
    elapsed_s = time.monotonic() - started
    return sum(lengths) / elapsed_s


async def run(options: argparse.Namespace) -> None:
    baseline = await measure(options, delay_s=0.0, pause_s=0.0)
    for name, delay_s, pause_s in (
        ("none", 0.0, 0.0),
        (f"{options.delay_ms:g} ms each way", options.delay_ms / 1000, 0.0),
        ("scheduler frozen for 1 s", 0.0, 1.0),
    ):
        tokens_per_s = await measure(options, delay_s=delay_s, pause_s=pause_s)
        result = {"injected": name, "tokens_per_s": round(tokens_per_s), "ratio": round(tokens_per_s / baseline, 3)}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=100.0, help="in each direction")
    parser.add_argument("--sequences", type=int, default=32, help="places in the worker's batch")
    parser.add_argument("--tokens", type=int, default=128, help="mean length of an answer")
    parser.add_argument("--step-ms", type=float, default=20.0, help="duration of an iteration")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
