"""What each process of the system takes of the processor for 1,000 tokens, and how often its threads change.

    python -m benchmarks.processor_time [--concurrency 32] [--requests 64] [--repetitions 1] [--idle 5]

The load of `benchmarks.engine` on `headrace up`. Where services and engine share the cores, this time is taken from the
engine. It varies less than throughput does on a machine with other work, so two versions can be told apart by it.

For each process: milliseconds of processor time for 1,000 output tokens, the share of them in the kernel, and times a
second that a thread gave its core away (`waits`) or lost it (`lost`). The engine's computing threads are its busiest.
With `--idle` also milliseconds of processor time a second while there is nothing to do.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
from tokenizers import Tokenizer

from benchmarks.client import run
from benchmarks.peers.weights import MODEL
from benchmarks.system import tokenizer_of
from benchmarks.workload import Job, jobs
from tests.e2e.launcher import Launched, launched

WARM_UP = 8
CLIENT = "client"


class Used(NamedTuple):
    """By a process since its start."""

    user_s: float
    kernel_s: float
    num_waits: int
    num_lost: int

    def plus(self, other: "Used", sign: int = 1) -> "Used":
        return Used(
            self.user_s + sign * other.user_s,
            self.kernel_s + sign * other.kernel_s,
            self.num_waits + sign * other.num_waits,
            self.num_lost + sign * other.num_lost,
        )


def used() -> dict[str, Used]:
    """By what the process is, of this one and all that it has started."""
    found: dict[str, Used] = {}
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            role = CLIENT if process == own else _role(process.cmdline())
            times, threads = process.cpu_times(), Path(f"/proc/{process.pid}/task").iterdir()
            switches = [_switches(thread) for thread in threads]
        except (psutil.Error, OSError):
            continue  # it has just ended
        more = Used(times.user, times.system, sum(a for a, _ in switches), sum(b for _, b in switches))
        found[role] = found[role].plus(more) if role in found else more
    return found


def _role(command: list[str]) -> str:
    for part in command[1:]:
        if part.startswith("headrace_"):
            return part.removeprefix("headrace_")
    return Path(command[0]).name if command else "?"


def _switches(thread: Path) -> tuple[int, int]:
    """Times that a thread gave its core away, and that it lost it."""
    lines = (thread / "status").read_text().splitlines()
    waits, lost = (int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return waits, lost


def difference(after: Mapping[str, Used], before: Mapping[str, Used]) -> dict[str, Used]:
    return {role: total.plus(before[role], -1) for role, total in after.items() if role in before}


def table(spent: Mapping[str, Used], per_s: float, scale: float) -> str:
    """`scale`: of the milliseconds in the first column."""
    lines = [f"  {'':<28}{'ms':>8}{'kernel':>8}{'waits/s':>9}{'lost/s':>8}"]
    for role, each in sorted(spent.items(), key=lambda item: -(item[1].user_s + item[1].kernel_s)):
        total_s = each.user_s + each.kernel_s
        share = each.kernel_s / total_s if total_s else 0.0
        lines.append(
            f"  {role:<28}{total_s * 1e3 / scale:>8.1f}{share:>8.0%}"
            f"{each.num_waits / per_s:>9.0f}{each.num_lost / per_s:>8.0f}"
        )
    others = sum(e.user_s + e.kernel_s for role, e in spent.items() if "engine_process" not in role)
    return "\n".join([*lines, f"  {'all but the engine':<28}{others * 1e3 / scale:>8.1f}"])


def measure(system: Launched, work: list[Job], concurrency: int) -> None:
    before, began = used(), time.perf_counter()
    summary = asyncio.run(run("127.0.0.1", system.port, MODEL, work, concurrency))
    elapsed_s = time.perf_counter() - began
    spent = difference(used(), before)
    assert summary.num_complete == len(work), summary
    num_tokens = sum(job.num_tokens for job in work)
    print(
        f"{summary.tokens_per_s:.1f} tokens/s, TTFT p50 {summary.ttft_p50_ms:.0f} ms, "
        f"inter-token p50 {summary.itl_p50_ms:.1f}, p99 {summary.itl_p99_ms:.0f} ms; for 1,000 tokens:"
    )
    print(table(spent, elapsed_s, num_tokens / 1000), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--idle", type=float, default=0.0, help="seconds without a request, measured too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, launched(Path(folder)) as system:
        tokenizer: Tokenizer = asyncio.run(tokenizer_of(system))

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        asyncio.run(run("127.0.0.1", system.port, MODEL, jobs(encode, WARM_UP, 8, first=10_000), WARM_UP))
        for repetition in range(options.repetitions):
            work = jobs(encode, options.requests, first=repetition * options.requests)
            measure(system, work, options.concurrency)
        if options.idle:
            time.sleep(2.0)
            before = used()
            time.sleep(options.idle)
            print("nothing to do; for a second:")
            print(table(difference(used(), before), options.idle, options.idle))


if __name__ == "__main__":
    main()
