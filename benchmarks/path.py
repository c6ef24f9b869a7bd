"""What the services cost: the full path against the same engine driven in process.

    python -m benchmarks.path [--concurrency 16] [--jobs 48] [--repetitions 3] [--layout apart|shared|device]
                              [--sync-interval 100ms]

Both sides run the same jobs on the same machine in turn, each with its own threads of the engine:

- apart: the engine has one core to itself, as it has an accelerator to itself in production. Services and client run on
  the other cores.
- shared: the engine has a thread on every core; services and client take their time from it.
- device: the engine takes no core at all but the time of an H100 with an 8-billion-parameter model, by the timing model
  of `headrace sim-worker`: what the services cost where engines compute elsewhere.

The broker syncs its disk every 100 ms, as that of the compose stack does. With `--sync-interval always` each request
waits for the disk before it is accepted, and those that come together wait for each other.

Clients pause for a random time before each request (the same on both sides), so that requests arrive while an iteration
runs. A client without a pause would hand the engine alone its next request exactly when an iteration ends.
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

import psutil
import uvloop
from tokenizers import Tokenizer

from benchmarks.client import Summary, run
from benchmarks.system import tokenizer_of
from benchmarks.workload import jobs
from headrace_shared.machine import num_cores
from headrace_worker.engine_link import BOUNDED_SPINNING
from tests.e2e.launcher import Launched, launched

PAUSE_S = 0.1


class Bench:
    def __init__(self, layout: str, concurrency: int, num_jobs: int, sync_interval: str) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.engine = "timing" if layout == "device" else "model"
        self.engine_cores = cores[:1] if layout == "apart" else cores
        self.other_cores = cores[1:] if layout == "apart" else cores
        self.num_threads = 1 if layout != "shared" else num_cores()
        self.concurrency = concurrency
        self.num_jobs = num_jobs
        self.sync_interval = sync_interval

    def in_process(self) -> Summary:
        os.sched_setaffinity(0, self.engine_cores)
        arguments = [str(self.concurrency), str(self.num_jobs), str(PAUSE_S), str(self.num_threads), self.engine]
        command = [sys.executable, "-m", "benchmarks.inprocess", *arguments]
        environ = BOUNDED_SPINNING | os.environ  # as the worker's engine process has it
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=900, env=environ).stdout
        return Summary(**json.loads(output))

    def full_path(self) -> Summary:
        os.sched_setaffinity(0, self.other_cores)  # inherited by all services
        environment = {
            "HEADRACE_NUM_THREADS": str(self.num_threads),
            "HEADRACE_ENGINE": self.engine,
            "HEADRACE_SYNC_INTERVAL": self.sync_interval,
        }
        with (
            tempfile.TemporaryDirectory() as folder,
            launched(Path(folder), "--no-autoscaler", environment=environment) as system,
        ):
            if self.engine == "model":
                self._place_engine(system)
            tokenizer: Tokenizer = asyncio.run(tokenizer_of(system))

            def encode(text: str) -> list[int]:
                return list(tokenizer.encode(text, add_special_tokens=False).ids)

            uvloop.run(run("127.0.0.1", system.port, "smollm2-135m", jobs(encode, 4, 8, first=10_000), 4))
            work = jobs(encode, self.num_jobs, pause_s=PAUSE_S)
            return uvloop.run(run("127.0.0.1", system.port, "smollm2-135m", work, self.concurrency))

    def _place_engine(self, system: Launched) -> None:
        engines = psutil.Process(system.pid("worker")).children(recursive=True)
        assert engines, "the worker has no engine process"
        for thread in (thread for engine in engines for thread in engine.threads()):
            os.sched_setaffinity(thread.id, self.engine_cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layout", choices=["apart", "shared", "device"], default="apart")
    parser.add_argument("--sync-interval", default="100ms", help="of the broker's disk")
    arguments = parser.parse_args()
    bench = Bench(arguments.layout, arguments.concurrency, arguments.jobs, arguments.sync_interval)
    pairs = []
    for repetition in range(arguments.repetitions):
        alone = bench.in_process()
        path = bench.full_path()
        assert path.num_complete == path.num_requests == arguments.jobs, path
        pairs.append(
            (
                path.tokens_per_s / alone.tokens_per_s,
                path.ttft_p50_ms - alone.ttft_p50_ms,
                path.ttft_mean_ms - alone.ttft_mean_ms,
            )
        )
        print(f"repetition {repetition + 1}")
        print(f"  engine alone {alone}")
        print(f"  full path    {path}")
        print(f"  {_line(*pairs[-1])}", flush=True)
    print(f"median: {_line(*(median(values) for values in zip(*pairs, strict=True)))} (targets >= 0.95, <= 5)")


def _line(ratio: float, added_p50_ms: float, added_mean_ms: float) -> str:
    """With two lengths of prompts and one client, the median falls between two groups: the mean says more then."""
    return f"throughput ratio {ratio:.3f}, added TTFT p50 {added_p50_ms:.1f} ms, mean {added_mean_ms:.1f} ms"


if __name__ == "__main__":
    main()
