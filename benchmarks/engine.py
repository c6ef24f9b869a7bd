"""The whole system on a CPU against other servers, each over HTTP, on the same machine, in turn.

    benchmarks/peers/setup.sh                    # once
    python -m benchmarks.engine [--servers headrace headrace-int4 vllm llama-bf16 …] [--concurrency 1 4 16 32]
                                [--requests 8 24 64 64] [--repetitions 3] [--no-shared-head]

Prompts of 128 and 512 tokens in turn, 64 new tokens, greedy, closed loop (workload.py); then, at 8 concurrent requests,
prompts that share their first 400 tokens, once primed. Every server is started anew in every repetition, and all have a
turn before the next repetition begins. Prints each run as it ends, and at the end the medians with their ratios. Ratios
compare figures of one invocation only. Nothing else should run meanwhile: client and server share the cores.
"""

import argparse
import asyncio
import compileall
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks import limits
from benchmarks.client import Summary, run
from benchmarks.peers.server import HOST, Server, ServerSpec
from benchmarks.peers.specs import OURS, PEERS, find_root, make_spec
from benchmarks.peers.weights import MODEL
from benchmarks.report import Results, print_report
from benchmarks.workload import Job, jobs, shared_head_jobs
from headrace_worker.models.checkpoint import open_checkpoint
from headrace_worker.models.source import find_model
from tests.e2e.launcher import free_ports

SHARED_CONCURRENCY = 8
WARM_UP = 4
SOURCES = [*Path(__file__).parents[1].glob("*/src"), *Path(__file__).parents[1].glob("services/*/src")]


class Workload:
    """Jobs of which no two have a prompt in common by accident, whatever runs before."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._next = 0

    def plain(self, count: int, num_tokens: int = 64) -> list[Job]:
        self._next += count
        return jobs(self._encode, count, num_tokens, first=self._next - count)

    def shared_head(self, count: int) -> list[Job]:
        self._next += count
        return shared_head_jobs(self._encode, count, first=self._next - count)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


async def measure(spec: ServerSpec, workload: Workload, options: argparse.Namespace, results: Results) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(spec, free_ports(1), Path(folder))
        try:
            start = await server.wait()
            results.starts.setdefault(spec.name, []).append(start)
            print(f"{spec.name}: first token after {start.first_token_s:.2f} s", flush=True)

            async def go(work: list[Job], concurrency: int) -> Summary:
                return await run(HOST, server.port, spec.model, work, concurrency)

            await go(workload.plain(WARM_UP, 8), WARM_UP)
            for concurrency, count in zip(options.concurrency, options.requests, strict=True):
                results.add(spec.name, str(concurrency), await go(workload.plain(count), concurrency))
            if options.shared_head:
                work = workload.shared_head(options.shared_requests + 1)
                await go(work[:1], 1)
                results.add(spec.name, "shared head", await go(work[1:], SHARED_CONCURRENCY))
            results.memory.setdefault(spec.name, []).append(server.peak_memory())
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--requests", nargs="+", type=int, default=[8, 24, 64, 64], help="one number a concurrency")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--shared-head", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--shared-requests", type=int, default=32)
    options = parser.parse_args()
    if len(options.requests) != len(options.concurrency):
        parser.error("--requests needs one number for each --concurrency")
    for sources in SOURCES:  # as after `make`, whatever has been changed since
        compileall.compile_dir(sources, quiet=1)
    root = find_root()
    specs = [make_spec(name, root) for name in options.servers]
    checkpoint = open_checkpoint(find_model(MODEL).path)
    workload = Workload(Tokenizer.from_buffer(checkpoint.make_card(MODEL, checkpoint.config.context).tokenizer))
    measured = limits.measure()
    results = Results()
    for repetition in range(options.repetitions):
        print(f"repetition {repetition + 1}", flush=True)
        for spec in specs:
            asyncio.run(measure(spec, workload, options, results))
        again = limits.measure()
        measured = limits.Limits(*map(max, measured, again))
    print_report(results, specs, checkpoint.config, measured)


if __name__ == "__main__":
    main()
