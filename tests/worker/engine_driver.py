"""Drives a torch engine as loop and scheduler would: chunked prompts, fragmented blocks, shared prefixes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

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
    TokenLogprobs,
)
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.iteration import SequenceSlice
from headrace_worker.torch_engine import TorchEngine

GREEDY = SamplingParams(seed=0, temperature=0.0)


def make_admission(
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    sequence_id: int = 0,
    choice: int = 0,
    output: Sequence[int] = (),
    block_ids: Sequence[int] = (),
    num_cached: int = 0,
    copies: Sequence[tuple[int, int]] = (),
    stop: StopParams | None = None,
) -> Admission:
    return Admission(
        sequence_id=SequenceId(sequence_id),
        request=Request(
            request_id=RequestId(f"{sequence_id:032x}"),
            router=RouterId("r"),
            model="m",
            prompt=pack_ids(prompt),
            sampling=sampling,
            stop=stop or StopParams(max_tokens=1000),
        ),
        choice=choice,
        attempt=0,
        block_ids=tuple(BlockId(block) for block in block_ids),
        output=pack_ids(output),
        num_cached=num_cached,
        copies=tuple((BlockId(source), BlockId(destination)) for source, destination in copies),
    )


@dataclass
class Running:
    sequence_id: SequenceId
    tokens: list[int]
    num_prompt: int
    block_ids: list[BlockId]
    num_computed: int = 0
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class EngineDriver:
    """Hands out blocks in random order, so that tables are never contiguous. Not a scheduler: it never runs out."""

    def __init__(self, engine: TorchEngine | CudaEngine, *, budget: int | None = None, seed: int = 0) -> None:
        self.engine = engine
        self.budget = budget or engine.facts.tokens_per_iteration
        self.free = list(range(engine.facts.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.running: list[Running] = []
        self._ids = 0

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        output: Sequence[int] = (),
        choice: int = 0,
        shares: Running | None = None,
        stop: StopParams | None = None,
    ) -> Running:
        """`shares`: whose computed prompt is reused, full blocks by reference, the rest by a copied block."""
        self._ids += 1
        tokens = [*prompt, *output]
        block_size = self.engine.facts.block_size
        num_cached = 0
        blocks: list[int] = []
        copies: list[tuple[int, int]] = []
        if shares is not None:
            common = 0
            while common < len(tokens) - 1 and common < shares.num_computed and tokens[common] == shares.tokens[common]:
                common += 1
            num_cached = common
            blocks = list(shares.block_ids[: common // block_size])
            if common % block_size:
                copies = [(shares.block_ids[common // block_size], self.free[-1])]
        while len(blocks) * block_size < len(tokens):
            blocks.append(self.free.pop())
        admission = make_admission(
            prompt,
            sampling,
            sequence_id=self._ids,
            choice=choice,
            output=output,
            block_ids=blocks,
            num_cached=num_cached,
            copies=copies,
            stop=stop,
        )
        self.engine.add(admission)
        running = Running(
            admission.sequence_id, tokens, len(prompt) + len(output), list(admission.block_ids), num_cached
        )
        self.running.append(running)
        return running

    def step(self) -> None:
        """One iteration: decoding sequences first, then prompt chunks in admission order."""
        room = self.budget
        pieces: list[tuple[Running, int]] = []
        for running in sorted(self.running, key=lambda one: len(one.tokens) - one.num_computed > 1):
            count = min(len(running.tokens) - running.num_computed, room)
            if count > 0:
                pieces.append((running, count))
                room -= count
        self.engine.submit([self.slice_of(running, count) for running, count in pieces])
        results = {result.sequence_id: result for result in self.engine.collect()}
        for running, count in pieces:
            running.num_computed += count
            if (result := results.get(running.sequence_id)) is not None:
                running.tokens.append(result.token)
                running.logprobs.append(result.logprobs)
                if result.error is not None:
                    running.errors.append(result.error)

    def slice_of(self, running: Running, count: int) -> SequenceSlice:
        end = running.num_computed + count
        while len(running.block_ids) * self.engine.facts.block_size < end:
            running.block_ids.append(BlockId(self.free.pop()))
        return SequenceSlice(
            running.sequence_id,
            running.num_computed,
            count,
            running.tokens[running.num_computed : end],
            running.block_ids,
            end == len(running.tokens),
        )

    def finish(self, running: Running, *, free: bool = True) -> None:
        self.engine.remove(running.sequence_id)
        self.running.remove(running)
        if free:
            self.free.extend(running.block_ids)

    def run_until(self, is_done: Callable[[Running], bool]) -> None:
        """Steps until every sequence is done and removed."""
        while self.running:
            self.step()
            for running in [one for one in self.running if is_done(one)]:
                self.finish(running)


def generate(
    engine: TorchEngine | CudaEngine, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams = GREEDY
) -> list[int]:
    """Runs one request alone."""
    driver = EngineDriver(engine)
    running = driver.add(prompt, sampling)
    driver.run_until(lambda one: len(one.output) >= num_tokens)
    return running.output[:num_tokens]


def poison_free_blocks(driver: EngineDriver) -> None:
    """Fills the memory of every free block with NaN."""
    pages = driver.engine.cache.pages
    pages[:, torch.tensor(driver.free)] = torch.nan
