"""An engine without torch that follows a script, for tests and benchmarks.

The next token is a function of (seed, choice, output index), so that any continuation can be checked
(`expected_output`). Some prompts ask for more: see `ECHO` and the others. With `checks` it also keeps what the loop and
the scheduler wrote into which block, and raises when an iteration would read anything but the sequence's own tokens.

`python -m tests.scripted_engine FD` is an engine process. Its environment: SCRIPTED_STEP_S (duration of an iteration),
SCRIPTED_LOOKS_AHEAD (0 or 1), SCRIPTED_CHECKS (0 or 1).
"""

import os
import sys
import time
from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from headrace_shared.codec import unpack_ids
from headrace_shared.errors import ConfigError
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import Admission, SequenceId, TokenLogprobs, TopLogprob
from headrace_worker.config import EngineConfig
from headrace_worker.engine_process import run
from headrace_worker.iteration import EngineFacts, Report, SampledToken, SequenceSlice

VOCAB_SIZE = 4096
FIRST_SPECIAL = 4000
"""The script's own tokens are below."""
ECHO = 4001
"""[ECHO, *nonce]: repeats the nonce for ever."""
ERROR_AT = 4002
"""[ERROR_AT, k]: the sequence fails at output index k."""
EXIT_AT = 4003
"""[EXIT_AT, k]: the process exits at output index k, whichever attempt it is."""
SLEEP = 4004
"""[SLEEP, ms]: each iteration with this sequence takes that much longer."""
HANG_AT = 4005
"""[HANG_AT, k]: the iteration that samples output index k never ends."""
BAD_TOKEN_AT = 4006
"""[BAD_TOKEN_AT, k]: gives a token outside the vocabulary at output index k."""


CARD = ModelCard(model="", tokenizer=b"{}", vocab_size=VOCAB_SIZE, context=0, eos_token_ids=(0,), created=1)


def scripted_token(prompt: Sequence[int], seed: int, choice: int, index: int) -> int:
    if prompt[0] == ECHO:
        return prompt[1 + index % (len(prompt) - 1)]
    mixed = (seed * 0x9E3779B97F4A7C15 + choice * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB) & (2**64 - 1)
    mixed ^= mixed >> 29
    return int((mixed * 0xD6E8FEB86659FD93 & (2**64 - 1)) >> 33) % FIRST_SPECIAL


def expected_output(prompt: Sequence[int], seed: int, choice: int, num_tokens: int) -> list[int]:
    """What a request without stop tokens generates."""
    return [scripted_token(prompt, seed, choice, index) for index in range(num_tokens)]


class ScriptedEngine:
    """Implements `iteration.Engine`."""

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        context: int = 4096,
        max_sequences: int = 64,
        tokens_per_iteration: int = 256,
        model: str = "scripted",
        looks_ahead: bool = False,
        num_stages: int = 1,
        max_drafts: int = 0,
        checks: bool = True,
        step_s: float = 0.0,
        card: ModelCard = CARD,
    ) -> None:
        context = min(context, num_blocks * block_size)
        card = replace(card, model=model, context=context)
        self._facts = EngineFacts(
            card,
            num_blocks,
            block_size,
            context,
            max_sequences,
            tokens_per_iteration,
            "cpu",
            "float32",
            num_stages,
            max_drafts,
        )
        self._looks_ahead = looks_ahead
        self._step_s = step_s
        self._cache = [[-1] * block_size for _ in range(num_blocks)] if checks else None
        self._sequences: dict[SequenceId, ScriptedSequence] = {}
        self._outstanding: deque[tuple[float, list[SampledToken]]] = deque()
        self._ready_at = 0.0

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def adapters(self) -> None:
        return None

    @property
    def looks_ahead(self) -> bool:
        return self._looks_ahead

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def add(self, admission: Admission) -> None:
        assert admission.sequence_id not in self._sequences, admission.sequence_id
        if self._cache is not None:
            for source, destination in admission.copies:
                self._cache[destination] = list(self._cache[source])
        self._sequences[admission.sequence_id] = self.make_sequence(admission)

    def make_sequence(self, admission: Admission) -> "ScriptedSequence":
        return ScriptedSequence(admission)

    def is_ready(self, sequence_id: SequenceId, *, wait: bool) -> bool:
        return True

    def remove(self, sequence_id: SequenceId) -> None:
        del self._sequences[sequence_id]

    def rest(self) -> None:
        assert not self._sequences and not self._outstanding, "rests with something to do"
        if self._cache is not None:
            self._cache = [[-1] * self._facts.block_size for _ in self._cache]

    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        assert slices and len(slices) <= self._facts.max_sequences, len(slices)
        assert sum(part.num_tokens for part in slices) <= self._facts.tokens_per_iteration
        num_stages = self._facts.num_stages
        assert len(self._outstanding) < (num_stages if num_stages > 1 else 2 if self._looks_ahead else 1)
        assert len({part.sequence_id for part in slices}) == len(slices), "a sequence twice in one iteration"
        duration_s = self._step_s
        sampled = []
        for part in slices:
            sequence = self._sequences[part.sequence_id]
            self._compute(sequence, part)
            sampled += [sequence.score(part.start + 1 + i, target) for i, target in enumerate(part.targets)]
            if part.samples:
                sampled += self._sample(sequence, part)
            if sequence.prompt[0] == SLEEP:
                duration_s += sequence.prompt[1] / 1000
        self._ready_at = max(self._ready_at, time.monotonic()) + duration_s
        self._outstanding.append((self._ready_at, sampled))

    def _sample(self, sequence: "ScriptedSequence", part: SequenceSlice) -> list[SampledToken]:
        """Items behind the first wrong draft mean nothing: they say so."""
        sampled = [sequence.sample()]
        drafts = list(part.token_ids or ())[part.num_tokens - part.num_drafts :]
        for draft in drafts:
            if draft == sequence.tokens[-1] and sampled[-1].error is None:
                sequence.num_computed += 1
                sampled.append(sequence.sample())
            else:
                break
        nothing = SampledToken(sequence.admission.sequence_id, -1, error="behind a wrong draft")
        return sampled + [nothing] * (1 + len(drafts) - len(sampled))

    def collect(self) -> list[SampledToken]:
        ready_at, sampled = self._outstanding.popleft()
        time.sleep(max(0.0, ready_at - time.monotonic()))
        return sampled

    def _compute(self, sequence: "ScriptedSequence", part: SequenceSlice) -> None:
        end = part.start + part.num_tokens - part.num_drafts
        assert part.num_drafts <= self._facts.max_drafts
        assert part.start == sequence.num_computed, f"{part} after {sequence.num_computed} computed positions"
        assert end <= len(sequence.tokens) and part.samples == (end == len(sequence.tokens)), part
        assert part.start + part.num_tokens <= len(part.block_ids) * self._facts.block_size, f"{part} has no block"
        if part.token_ids is None:
            assert part.num_tokens == 1 and self._outstanding and self._facts.num_stages == 1, part
        else:
            assert list(part.token_ids)[: end - part.start] == sequence.tokens[part.start : end], part
        sequence.num_computed = end
        if self._cache is None:
            return
        size = self._facts.block_size
        written = part.token_ids if part.token_ids is not None else sequence.tokens[part.start : end]
        for position, token in enumerate(written, part.start):
            self._cache[part.block_ids[position // size]][position % size] = token
        read = [self._cache[part.block_ids[position // size]][position % size] for position in range(end)]
        assert read == sequence.tokens[:end], f"sequence {part.sequence_id} reads {read}, not {sequence.tokens[:end]}"


class ScriptedSequence:
    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.prompt = unpack_ids(admission.request.prompt).tolist()
        self.tokens = self.prompt + unpack_ids(admission.output).tolist()
        self.num_computed = admission.num_cached

    def sample(self) -> SampledToken:
        request = self.admission.request
        index = len(self.tokens) - len(self.prompt)
        token = self.token(index)
        while index < request.stop.min_tokens and token in request.stop.stop_token_ids:
            token = (token + 1) % FIRST_SPECIAL
        error = self.mishap(index)
        if self.prompt[0] == BAD_TOKEN_AT and self.prompt[1] == index:
            token = VOCAB_SIZE
        self.tokens.append(token)
        logprobs = None
        if request.sampling.num_logprobs is not None:
            top = [TopLogprob(rank, -1.0 - rank) for rank in range(request.sampling.num_logprobs)]
            logprobs = TokenLogprobs(-0.5, tuple(top))
        return SampledToken(self.admission.sequence_id, token, logprobs, error)

    def score(self, position: int, target: int) -> SampledToken:
        """Every position has a log-probability of its own."""
        assert self.tokens[position] == target, (position, target)
        top = [
            TopLogprob(rank, -1.0 - rank) for rank in range(self.admission.request.sampling.num_prompt_logprobs or 0)
        ]
        return SampledToken(self.admission.sequence_id, target, TokenLogprobs(-position / 4, tuple(top), 1 + position))

    def token(self, index: int) -> int:
        return scripted_token(self.prompt, self.admission.request.sampling.seed, self.admission.choice, index)

    def mishap(self, index: int) -> str | None:
        """An error of the sequence alone. May also end or stop the process."""
        if len(self.prompt) > 1 and index == self.prompt[1]:
            if self.prompt[0] == ERROR_AT:
                return "scripted error"
            if self.prompt[0] == EXIT_AT:
                os._exit(7)
            if self.prompt[0] == HANG_AT:
                time.sleep(3600)
        return None


def load(
    config: EngineConfig,
    report: Report,
    engine: type[ScriptedEngine] = ScriptedEngine,
    card: ModelCard = CARD,
) -> ScriptedEngine:
    if config.model == "missing":
        raise ConfigError("model", "there is no model 'missing'")
    report("script", 1, 1)
    return engine(
        num_blocks=config.num_blocks or 256,
        block_size=config.block_size,
        context=config.context or 4096,
        max_sequences=config.max_sequences or 64,
        tokens_per_iteration=config.tokens_per_iteration or 256,
        model=config.served_name or config.model,
        looks_ahead=os.environ.get("SCRIPTED_LOOKS_AHEAD", "1") == "1",
        num_stages=config.place.pipeline_parallel,
        checks=os.environ.get("SCRIPTED_CHECKS", "1") == "1",
        step_s=float(os.environ.get("SCRIPTED_STEP_S", "0.002")),
        card=card,
    )


if __name__ == "__main__":
    sys.exit(run(load, sys.argv[1:]))
