"""The engine alone: the worker's own iteration loop, driven in one process with no broker, router or client.

    python -m benchmarks.inprocess CONCURRENCY NUM_JOBS PAUSE_S NUM_THREADS [model|timing]

prints one JSON line: the fields of `client.Summary`. This is the limit that the full path is measured against. As
there, requests arrive while an iteration runs and wait for its end: their pauses are those of `client.run`.
"""

import heapq
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks.client import Summary, Timing, summarize
from benchmarks.workload import Job, jobs
from headrace_shared.codec import pack_ids
from headrace_shared.messages import (
    Admission,
    BlockId,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceId,
    StopParams,
)
from headrace_worker.config import EngineConfig, with_defaults
from headrace_worker.engine import load
from headrace_worker.iteration import Engine, EngineFacts, SampledToken, SequenceSlice
from headrace_worker.loop import IterationLoop
from headrace_worker.timing.engine import TimingEngine
from headrace_worker.timing.hardware import find_gpu
from headrace_worker.timing.link import MAX_LAG_S
from headrace_worker.timing.roofline import Roofline
from headrace_worker.timing.settings import TimingSettings
from headrace_worker.timing.shapes import find_shape


class _Running(NamedTuple):
    timing: Timing
    begun: float
    block_ids: tuple[BlockId, ...]
    num_tokens: int


class InProcess:
    """Keeps `concurrency` sequences running; blocks come from a plain free list, without a prefix cache."""

    def __init__(self, engine: Engine) -> None:
        self.facts = engine.facts
        self._engine = engine
        self._loop = IterationLoop(engine)
        self._free = [BlockId(block) for block in range(self.facts.num_blocks)]
        self._next_id = 1

    def run(self, work: list[Job], concurrency: int) -> Summary:
        timings: list[Timing] = []
        running: dict[SequenceId, _Running] = {}
        unsent = iter(work)
        arriving: list[tuple[float, int, Job]] = []
        """Requests that were drawn and are due at some time, the next one first."""
        started = time.perf_counter()

        def draw() -> None:
            if (job := next(unsent, None)) is not None:
                heapq.heappush(arriving, (time.perf_counter() + job.pause_s, next(numbers), job))

        numbers = itertools.count()
        for _ in range(concurrency):
            draw()
        while running or arriving:
            while arriving and arriving[0][0] <= time.perf_counter():
                due, _, job = heapq.heappop(arriving)
                self._admit(job, due, running)
            result = self._loop.step()
            if result is None:
                time.sleep(max(0.0, arriving[0][0] - time.perf_counter()))
                if isinstance(self._engine, PacedEngine):
                    self._engine.wake()
                continue
            now = time.perf_counter()
            for row in result.sequences:
                sequence = running[row.sequence_id]
                if row.token is not None:
                    sequence.timing.tokens.append(now - sequence.begun)
                sequence.timing.complete = len(sequence.timing.tokens) == sequence.num_tokens
            for sequence_id in result.released:
                sequence = running.pop(sequence_id)
                timings.append(sequence.timing)
                self._free.extend(sequence.block_ids)
                draw()
        return summarize(timings, sum(job.num_tokens for job in work), time.perf_counter() - started)

    def _admit(self, job: Job, begun: float, running: dict[SequenceId, _Running]) -> None:
        sequence_id = SequenceId(self._next_id)
        self._next_id += 1
        num_blocks = -(-(len(job.prompt_ids) + job.num_tokens) // self.facts.block_size)
        block_ids = tuple(self._free.pop() for _ in range(num_blocks))
        request = Request(
            request_id=RequestId(f"{sequence_id:032x}"),
            router=RouterId("none"),
            model="",
            prompt=pack_ids(job.prompt_ids),
            sampling=SamplingParams(seed=0, temperature=0.0),
            stop=StopParams(max_tokens=job.num_tokens),
        )
        self._loop.admit(Admission(sequence_id=sequence_id, request=request, choice=0, attempt=0, block_ids=block_ids))
        running[sequence_id] = _Running(Timing(), begun, block_ids, job.num_tokens)


class PacedEngine(TimingEngine):
    """Takes the time that it says it takes, as `TimingLink` does."""

    def __init__(self, roofline: Roofline, facts: EngineFacts) -> None:
        super().__init__(roofline, facts)
        self._due = time.perf_counter()

    def wake(self) -> None:
        """It had nothing to do. What comes now makes up for nothing."""
        self._due = time.perf_counter()

    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        before_s = self.elapsed_s
        super().submit(slices)
        self._due = max(self._due, time.perf_counter() - MAX_LAG_S) + self.elapsed_s - before_s

    def collect(self) -> list[SampledToken]:
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return super().collect()


def engine_of(kind: str, num_threads: int) -> Engine:
    """`model`: SmolLM2 on the CPU. `timing`: what the worker's default settings for the timing engine make."""
    engine = load(EngineConfig(num_threads=num_threads), lambda stage, current, total: None)
    if kind == "model":
        return engine
    settings = TimingSettings()
    config = with_defaults(EngineConfig(), on_gpu=True)
    roofline = Roofline(find_gpu(settings.gpu), find_shape(settings.gpu_model), 1, 16, 1.0)
    num_blocks = roofline.num_blocks(config.block_size, config.gpu_memory_share)
    facts = engine.facts._replace(
        num_blocks=num_blocks,
        block_size=config.block_size,
        context=roofline.shape.context,
        max_sequences=config.max_sequences,
        tokens_per_iteration=config.tokens_per_iteration,
    )
    return PacedEngine(roofline, facts)


def main(concurrency: int, num_jobs: int, pause_s: float, num_threads: int, kind: str) -> None:
    bench = InProcess(engine_of(kind, num_threads))
    tokenizer = Tokenizer.from_buffer(bench.facts.card.tokenizer)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    bench.run(jobs(encode, 4, 8, first=10_000), 4)
    print(json.dumps(asdict(bench.run(jobs(encode, num_jobs, pause_s=pause_s), concurrency))))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:6] or ["model"])
