"""What the services cost: the full path against the same engine driven in process.

    python -m benchmarks.path [--concurrency 16] [--jobs 48] [--repetitions 3]

Both sides run the same jobs on the same machine in turn. The client of the full path runs in this process and takes its
share of the processor; the engine alone has no client.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from benchmarks.client import Summary, run
from benchmarks.system import tokenizer_of
from benchmarks.workload import jobs
from headrace_worker.engine_link import BOUNDED_SPINNING
from tests.e2e.launcher import launched


def in_process(concurrency: int, num_jobs: int) -> Summary:
    command = [sys.executable, "-m", "benchmarks.inprocess", str(concurrency), str(num_jobs)]
    environ = BOUNDED_SPINNING | os.environ  # as the worker's engine process has it
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=900, env=environ).stdout
    return Summary(**json.loads(output))


def full_path(concurrency: int, num_jobs: int) -> Summary:
    with tempfile.TemporaryDirectory() as folder, launched(Path(folder), "--no-autoscaler") as system:
        tokenizer: Tokenizer = asyncio.run(tokenizer_of(system))

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        asyncio.run(run("127.0.0.1", system.port, "smollm2-135m", jobs(encode, 4, 8, first=10_000), 4))
        return asyncio.run(run("127.0.0.1", system.port, "smollm2-135m", jobs(encode, num_jobs, 64), concurrency))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    pairs = []
    for repetition in range(arguments.repetitions):
        alone = in_process(arguments.concurrency, arguments.jobs)
        path = full_path(arguments.concurrency, arguments.jobs)
        assert path.num_complete == path.num_requests == arguments.jobs, path
        pairs.append((path.tokens_per_s / alone.tokens_per_s, path.ttft_p50_ms - alone.ttft_p50_ms))
        print(f"repetition {repetition + 1}")
        print(f"  engine alone {alone}")
        print(f"  full path    {path}")
        print(f"  throughput ratio {pairs[-1][0]:.3f}, added TTFT p50 {pairs[-1][1]:.1f} ms", flush=True)
    ratio, added = (median(values) for values in zip(*pairs, strict=True))
    print(f"median: throughput ratio {ratio:.3f} (target >= 0.95), added TTFT p50 {added:.1f} ms (target <= 5)")


if __name__ == "__main__":
    main()
