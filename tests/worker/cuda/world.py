"""Sequences on the asynchronous engine, under the real iteration loop, with blocks that come late."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headrace_shared.messages import Admission, BlockId, Extension, SamplingParams, SequenceId, StopParams
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.iteration import SequenceResult
from headrace_worker.loop import IterationLoop
from tests.worker.cuda.toy import BLOCK_SIZE, expected
from tests.worker.engine_driver import make_admission

GREEDY: dict[str, Any] = {"temperature": 0.0}
KINDS: list[dict[str, Any]] = [
    GREEDY,
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 9},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 0.9},
    {"temperature": 0.9, "logit_bias": {3: 4.0, 60: -100.0, 1000: 1.0}},
    {"temperature": 0.0, "num_logprobs": 0},
    {"temperature": 1.0, "num_logprobs": 5, "presence_penalty": 0.5},
]


class World:
    """Hands out blocks, some of them late, so that sequences stall and go on; what was given back is poisoned."""

    def __init__(self, engine: CudaEngine, seed: int) -> None:
        self.engine = engine
        self.loop = IterationLoop(engine)
        self.rng = random.Random(seed)
        self.free = list(range(engine.facts.num_blocks))
        self.rng.shuffle(self.free)
        self.poison()
        self.blocks: dict[SequenceId, list[int]] = {}
        self.admissions: dict[SequenceId, Admission] = {}
        self.rows: dict[SequenceId, list[SequenceResult]] = {}
        self.stopped: set[SequenceId] = set()

    def poison(self) -> None:
        self.engine.cache.pages[:, torch.tensor(self.free, dtype=torch.int64)] = torch.nan

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def admit(
        self,
        prompt: Sequence[int],
        sampling: dict[str, Any],
        *,
        max_tokens: int = 12,
        output: Sequence[int] = (),
        stop: Sequence[int] = (),
        min_tokens: int = 0,
        shares: SequenceId | None = None,
        num_cached: int = 0,
    ) -> SequenceId:
        number = SequenceId(len(self.admissions) + 1)
        needed = -(-(len(prompt) + len(output)) // BLOCK_SIZE)
        blocks: list[int] = []
        copies: list[tuple[int, int]] = []
        if shares is not None:
            blocks = self.blocks[shares][: num_cached // BLOCK_SIZE]
            if num_cached % BLOCK_SIZE:
                copies = [(self.blocks[shares][num_cached // BLOCK_SIZE], self.free[-1])]
        own = self.take(needed - len(blocks))
        admission = make_admission(
            prompt,
            SamplingParams(**{"seed": int(number), **sampling}),
            sequence_id=number,
            choice=number % 3,
            output=output,
            block_ids=blocks + own,
            num_cached=num_cached,
            copies=copies,
            stop=StopParams(max_tokens=max_tokens, stop_token_ids=tuple(stop), min_tokens=min_tokens),
        )
        self.admissions[number], self.blocks[number], self.rows[number] = admission, blocks + own, []
        self.loop.admit(admission)
        return number

    def extend(self) -> None:
        for number, blocks in self.blocks.items():
            if self.rng.random() < 0.3 and self.free and len(blocks) * BLOCK_SIZE < self.engine.facts.context:
                more = self.take(1)
                blocks += more
                self.loop.extend(Extension(number, tuple(BlockId(block) for block in more)))

    def step(self) -> bool:
        result = self.loop.step()
        if result is None:
            return False
        for row in result.sequences:
            self.rows[row.sequence_id].append(row)
        for number in result.released:
            self.free += self.blocks.pop(number)
            self.poison()
        return True

    def run(self) -> None:
        while self.blocks:
            self.extend()
            self.step()

    def output(self, number: SequenceId) -> list[int]:
        return [row.token for row in self.rows[number] if row.token is not None]

    def check(self, number: SequenceId) -> None:
        rows = [row for row in self.rows[number] if row.token is not None]
        tokens, logprobs = expected(self.admissions[number], len(rows))
        assert [row.token for row in rows] == tokens, self.admissions[number]
        for row, reference in zip(rows, logprobs, strict=True):
            if reference is None:
                assert row.logprobs is None
                continue
            assert row.logprobs is not None
            assert row.logprobs.logprob == pytest.approx(reference.logprob, abs=1e-5)
            assert [item.token for item in row.logprobs.top] == [item.token for item in reference.top]
