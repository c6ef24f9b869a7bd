"""Whether an engine process grows: a day's variety of requests in minutes, and its memory meanwhile.

    python -m benchmarks.engine_memory [--model smollm2-135m | tiny] [--dtype float32] [--native auto|off] [--minutes 5]
                                       [--blocks 1024] [--concurrency 8] [--threads 1] [--context 1024] [--seed 1]

One engine process, as a worker starts it, under the scheduler's core in this process: prompts and answers of random
lengths, drawn in every way, cancelled now and then. Prints, some times a minute, how far it is, its memory, how much
of that are pages of the KV cache (or of huge memory next to it) and what is left, and at the end by how much the rest
grew in the second half. `tiny`: a random model of a few hundred kilobytes, for as many iterations as possible. Exit
code 1 if the rest grows by more than a MB a minute.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.fault_runs import MAX_SLOPE_MB_PER_MIN, slope_of
from headrace_scheduler.decisions import WorkerFacts
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.codec import pack_ids
from headrace_shared.messages import (
    CancelReason,
    Grant,
    Progress,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceProgress,
    StopParams,
    WorkerId,
)
from headrace_worker.config import EngineConfig
from headrace_worker.engine_frames import Iteration, Load, Loaded
from headrace_worker.engine_link import EngineLink
from tests.worker.checkpoints import save_checkpoint

MODULE = "headrace_worker.engine_process"
WORKER = WorkerId("worker-1")
NUM_PREFIXES = 8
CANCELLED = 0.1
"""Of all requests."""
REPORT_S = 10.0


class Memory(NamedTuple):
    """MiB."""

    total: float
    cache: float
    """Of the mapping that had most left to fill when the engine was loaded."""
    heap: float

    @property
    def rest(self) -> float:
        return self.total - self.cache


def mappings(pid: int) -> Iterator[tuple[str, str, float, float]]:
    """Address, name, size and resident part of each, in MiB."""
    address, name, size = "", "", 0.0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            address, name = fields[0].partition("-")[0], " ".join(fields[5:])
        elif fields[0] == "Size:":
            size = int(fields[1]) / 1024
        elif fields[0] == "Rss:":
            yield address, name, size, int(fields[1]) / 1024


def memory_of(pid: int, cache_at: str) -> Memory:
    total = cache = heap = 0.0
    for address, name, _, resident in mappings(pid):
        total += resident
        cache += resident if address == cache_at else 0.0
        heap += resident if name == "[heap]" else 0.0
    return Memory(total, cache, heap)


class Bench:
    def __init__(self, link: EngineLink, facts: Loaded, options: argparse.Namespace) -> None:
        self._link = link
        self._chance = random.Random(options.seed)
        self._vocab_size = facts.card.vocab_size
        self._context = facts.context
        self._concurrency = options.concurrency
        self._core = Scheduler()
        worker = WorkerFacts(
            facts.num_blocks, facts.block_size, facts.context, facts.max_sequences, facts.tokens_per_iteration
        )
        self._core.add_worker(WORKER, worker, (), 0.0)
        self._prefixes = [self._tokens(self._context // 4) for _ in range(NUM_PREFIXES)]
        self._open: set[RequestId] = set()
        self._number = 0
        self.num_done = 0
        self.num_iterations = 0

    def fill(self) -> None:
        while len(self._open) < self._concurrency:
            request = self._request()
            self._open.add(request.request_id)
            self._core.add_request(request, "", self._number, 1, time.monotonic())
        if self._chance.random() < CANCELLED / 32:
            victim = self._chance.choice(sorted(self._open))
            self._core.cancel(victim, None, CancelReason.CLIENT, time.monotonic())
        self._grant()

    async def step(self) -> None:
        frame = await self._link.read()
        assert isinstance(frame, Iteration), frame
        self.num_iterations = frame.num_iterations
        rows = tuple(
            SequenceProgress(
                row.sequence_id,
                row.num_computed,
                () if row.token is None else (row.token,),
                row.finish,
                row.error,
            )
            for row in frame.rows
        )
        assert not [row.error for row in rows if row.error is not None], rows
        progress = Progress(
            worker=WORKER, epoch=1, number=frame.num_iterations, grant_seen=0, sequences=rows, released=frame.released
        )
        self._core.apply_progress(WORKER, progress, time.monotonic())
        self._grant()

    def _grant(self) -> None:
        decisions = self._core.schedule(time.monotonic())
        for ended in decisions.ended:
            self._open.discard(ended.event.request_id)
            self.num_done += 1
        for credit in decisions.credits.values():
            self._link.send(
                Grant(
                    worker=WORKER,
                    epoch=1,
                    number=1,
                    progress_seen=0,
                    admissions=tuple(credit.admissions),
                    extensions=tuple(credit.extensions),
                    releases=tuple(credit.releases),
                )
            )

    def _request(self) -> Request:
        self._number += 1
        chance = self._chance
        prompt = self._tokens(round(2 ** chance.uniform(0.0, 8.0)))
        if chance.random() < 0.25:
            prompt = chance.choice(self._prefixes) + prompt
        max_tokens = min(round(2 ** chance.uniform(0.0, 7.0)), self._context - len(prompt) - 1)
        return Request(
            request_id=RequestId(f"{self._number:032x}"),
            router=RouterId("r"),
            model="m",
            prompt=pack_ids(prompt),
            sampling=self._sampling(),
            stop=StopParams(max_tokens=max(1, max_tokens)),
            num_choices=chance.choice((1, 1, 1, 3)),
        )

    def _sampling(self) -> SamplingParams:
        seed = self._number
        kinds = (
            SamplingParams(seed=seed, temperature=0.0),
            SamplingParams(seed=seed, temperature=0.0, num_logprobs=5),
            SamplingParams(seed=seed, temperature=0.8, top_p=0.9, top_k=50),
            SamplingParams(seed=seed, temperature=1.0, min_p=0.05, num_logprobs=0),
            SamplingParams(seed=seed, temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.5),
            SamplingParams(seed=seed, temperature=0.7, logit_bias={7: 2.0}, bad_words=((3, 4), (5,))),
        )
        return self._chance.choice(kinds)

    def _tokens(self, count: int) -> list[int]:
        return self._chance.choices(range(3, self._vocab_size), k=count)


async def run(options: argparse.Namespace, folder: Path) -> int:
    model = options.model
    if model == "tiny":
        save_checkpoint(folder, max_position_embeddings=options.context)
        model = str(folder)
    config = EngineConfig(
        model=model,
        dtype=options.dtype,
        native=options.native,
        num_threads=options.threads,
        num_blocks=options.blocks,
        context=options.context,
    )
    link = await EngineLink.start(MODULE)
    try:
        link.send(Load(config=config))
        while not isinstance(facts := await link.read(), Loaded):
            pass
        cache_at = max(mappings(link.pid), key=lambda mapping: mapping[2] - mapping[3])[0]
        return await watch(Bench(link, facts, options), link.pid, cache_at, 60 * options.minutes)
    finally:
        await link.close()


async def watch(bench: Bench, pid: int, cache_at: str, length_s: float) -> int:
    print(f"{'min':>6} {'iterations':>10} {'requests':>8} {'total':>8} {'cache':>8} {'heap':>8} {'rest':>8}  MiB")
    began_at = time.monotonic()
    reported_at = began_at - REPORT_S
    samples: list[tuple[float, Memory]] = []
    while (now := time.monotonic()) - began_at < length_s:
        if now - reported_at >= REPORT_S:
            reported_at = now
            minutes, memory = (now - began_at) / 60, memory_of(pid, cache_at)
            samples.append((minutes, memory))
            print(
                f"{minutes:6.2f} {bench.num_iterations:10} {bench.num_done:8} {memory.total:8.1f} {memory.cache:8.1f}"
                f" {memory.heap:8.1f} {memory.rest:8.1f}",
                flush=True,
            )
        bench.fill()
        await bench.step()
    late = samples[len(samples) // 2 :]
    slope = slope_of([(minutes, memory.rest) for minutes, memory in late])
    print(f"beside the cache, second half: {slope:+.2f} MB/min, {bench.num_iterations} iterations in all")
    return 0 if slope <= MAX_SLOPE_MB_PER_MIN else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--native", choices=("auto", "off"), default="auto")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(run(parser.parse_args(), Path(scratch)))


if __name__ == "__main__":
    sys.exit(main())
