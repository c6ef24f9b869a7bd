"""The worker's own iteration loop on an engine in this process: prompts in, then a batch that only decodes."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from benchmarks.gpu.measuring import IS_DRY, elapsed_s, mark
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
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.iteration import AdapterSet, EngineFacts, SampledToken, SequenceSlice
from headrace_worker.loop import IterationLoop

GREEDY = SamplingParams(seed=0, temperature=0.0)


class TimedEngine:
    """Notes on the device when each iteration's work begins and ends there."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts

    @property
    def adapters(self) -> AdapterSet | None:
        return self._engine.adapters

    @property
    def looks_ahead(self) -> bool:
        return self._engine.looks_ahead

    def add(self, admission: Admission) -> None:
        self._engine.add(admission)

    def is_ready(self, sequence_id: SequenceId, *, wait: bool) -> bool:
        return self._engine.is_ready(sequence_id, wait=wait)

    def remove(self, sequence_id: SequenceId) -> None:
        self._engine.remove(sequence_id)

    def rest(self) -> None:
        self._engine.rest()

    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        if IS_DRY:
            self._engine.submit(slices)
            return
        begin, end = mark(), mark()
        begin.record()
        self._engine.submit(slices)
        end.record()
        self._marks.append((begin, end))

    def collect(self) -> list[SampledToken]:
        return self._engine.collect()

    def take_idle_share(self) -> float | None:
        """The share of the time since the last call in which the device had no iteration to work on. None: there is
        no device."""
        marks, self._marks = self._marks, []
        if len(marks) < 2:
            return None
        torch.cuda.synchronize()
        idle_s = sum(elapsed_s(before[1], after[0]) for before, after in pairwise(marks))
        return idle_s / elapsed_s(marks[0][0], marks[-1][1])


class Measured(NamedTuple):
    prefill_s: float
    """From the first iteration until every sequence has its first token."""
    decode_s: float
    """Of one iteration in which every sequence decodes."""
    idle_share: float | None
    """Of the decoding iterations' time."""


def run(
    engine: CudaEngine, batch: int, num_prompt: int, num_decodes: int, sampling: SamplingParams = GREEDY
) -> Measured:
    """`batch` sequences of `num_prompt` tokens; then `num_decodes` iterations are timed."""
    timed = TimedEngine(engine)
    loop = IterationLoop(timed)
    facts = engine.facts
    num_blocks = -(-(num_prompt + num_decodes + 8) // facts.block_size)
    for number in range(batch):
        prompt = [(number * 131 + place * 7) % facts.card.vocab_size for place in range(num_prompt)]
        request = Request(
            request_id=RequestId(""),
            router=RouterId(""),
            model="",
            prompt=pack_ids(prompt),
            sampling=sampling,
            stop=StopParams(max_tokens=num_decodes + 6),
        )
        blocks = tuple(BlockId(number * num_blocks + index) for index in range(num_blocks))
        loop.admit(Admission(sequence_id=SequenceId(number), request=request, choice=0, attempt=0, block_ids=blocks))
    begun: set[SequenceId] = set()
    started = time.perf_counter()
    while len(begun) < batch:
        result = loop.step()
        assert result is not None
        begun |= {row.sequence_id for row in result.sequences if row.token is not None}
    prefilled = time.perf_counter()
    # The last prompt's iteration and the one after it were queued together: from here on everybody decodes.
    for _ in range(2):
        loop.step()
    timed.take_idle_share()
    decoding = time.perf_counter()
    for _ in range(num_decodes):
        loop.step()
    ended = time.perf_counter()
    idle_share = timed.take_idle_share()
    loop.reset()
    return Measured(prefilled - started, (ended - decoding) / num_decodes, idle_share)
