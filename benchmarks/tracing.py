"""What tracing costs: two systems side by side, one that traces every request and one that traces none.

    python -m benchmarks.tracing [--concurrency 16] [--jobs 32] [--rounds 6]

Both stay up; rounds of the same load go to the one and to the other in turn, and who is first changes with each. The
collector is a process of its own on the same machine that reads what comes and throws it away.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import psutil
from tokenizers import Tokenizer

from benchmarks.client import Summary, run
from benchmarks.system import tokenizer_of
from benchmarks.workload import jobs
from tests.e2e.launcher import Launched, launched
from tests.otlp_receiver import OtlpReceiver

MODEL = "smollm2-135m"
NUM_TOKENS = 32
SERVICES = ("router", "scheduler", "worker")


def collect(pipe: Connection) -> None:
    """A process: tells its address, and when it is told to stop how many spans have come."""
    with OtlpReceiver.running() as receiver:
        pipe.send(receiver.url)
        pipe.recv()
        pipe.send(len(receiver.spans))


def cpu_s(system: Launched) -> float:
    """Of the services, without the engine."""
    times = [psutil.Process(system.pid(service)).cpu_times() for service in SERVICES]
    return sum(time.user + time.system for time in times)


def load(system: Launched, tokenizer: Tokenizer, first: int, count: int, concurrency: int) -> Summary:
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return asyncio.run(run("127.0.0.1", system.port, MODEL, jobs(encode, count, NUM_TOKENS, first), concurrency))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    collector = context.Process(target=collect, args=(other_end,), daemon=True)
    collector.start()
    environments = {"traced": {"OTEL_EXPORTER_OTLP_ENDPOINT": str(pipe.recv())}, "plain": {}}
    rates: dict[str, list[float]] = {name: [] for name in environments}
    costs: dict[str, list[float]] = {name: [] for name in environments}
    with ExitStack() as stack:
        systems = {}
        for name, environment in environments.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            systems[name] = stack.enter_context(launched(folder, "--no-autoscaler", environment=environment))
        tokenizer = asyncio.run(tokenizer_of(systems["plain"]))
        for system in systems.values():
            load(system, tokenizer, 90_000, 8, 4)
        for number in range(arguments.rounds):
            for name in ("traced", "plain") if number % 2 else ("plain", "traced"):
                before = cpu_s(systems[name])
                # The same prompts for both, and in each round others, which no cache knows.
                summary = load(systems[name], tokenizer, number * 1000, arguments.jobs, arguments.concurrency)
                assert summary.num_complete == arguments.jobs, summary
                rates[name].append(summary.tokens_per_s)
                costs[name].append((cpu_s(systems[name]) - before) / arguments.jobs)
            ratio = rates["traced"][-1] / rates["plain"][-1]
            print(f"round {number + 1}: throughput traced / plain {ratio:.3f}", flush=True)
    pipe.send("stop")
    num_spans = int(pipe.recv())
    collector.join()
    ratios = [traced / plain for traced, plain in zip(rates["traced"], rates["plain"], strict=True)]
    extra_ms = 1e3 * (median(costs["traced"]) - median(costs["plain"]))
    per_call = num_spans / (arguments.rounds * arguments.jobs + 8)
    print(
        f"median of {arguments.rounds} ratios: {median(ratios):.3f} (target >= 0.97), from {min(ratios):.3f} to "
        f"{max(ratios):.3f}; {extra_ms:.2f} ms of CPU more a call in the services; {per_call:.1f} spans a call"
    )


if __name__ == "__main__":
    main()
