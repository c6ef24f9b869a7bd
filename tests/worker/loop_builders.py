"""Builders for tests that drive the iteration loop."""

from collections.abc import Iterable, Sequence

from headrace_shared.codec import pack_ids
from headrace_shared.messages import (
    Admission,
    BlockId,
    FinishReason,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceId,
    StopParams,
    TokenLogprobs,
)
from headrace_worker.iteration import SequenceResult, SequenceSlice
from headrace_worker.loop import IterationLoop, StepResult
from tests.scripted_engine import ScriptedEngine


def admission(
    sequence_id: int,
    prompt: list[int],
    blocks: Iterable[int],
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    output: list[int] | None = None,
    num_cached: int = 0,
    copies: tuple[tuple[int, int], ...] = (),
    seed: int = 0,
    choice: int = 0,
    num_logprobs: int | None = None,
    temperature: float = 1.0,
    num_prompt_logprobs: int | None = None,
) -> Admission:
    request = Request(
        request_id=RequestId(f"{sequence_id:032x}"),
        router=RouterId("router-1"),
        model="scripted",
        prompt=pack_ids(prompt),
        sampling=SamplingParams(
            seed=seed,
            num_logprobs=num_logprobs,
            temperature=temperature,
            num_prompt_logprobs=num_prompt_logprobs,
        ),
        stop=StopParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_token_ids),
    )
    return Admission(
        sequence_id=SequenceId(sequence_id),
        request=request,
        choice=choice,
        attempt=0,
        block_ids=tuple(BlockId(block) for block in blocks),
        output=pack_ids(output or []),
        num_cached=num_cached,
        copies=tuple((BlockId(source), BlockId(destination)) for source, destination in copies),
        ack_subject="$JS.ACK.1",
    )


class Collected:
    """Everything that a loop reported, by sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.scores: dict[int, list[TokenLogprobs]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}
        self.num_computed: dict[int, int] = {}
        self.released: list[int] = []
        self.num_prefill_tokens = 0
        self.num_iterations = 0

    def add(self, step: StepResult) -> None:
        for result in step.sequences:
            self._add_result(result)
        self.released.extend(step.released)
        self.num_prefill_tokens += step.num_prefill_tokens
        self.num_iterations = step.num_iterations

    def _add_result(self, result: SequenceResult) -> None:
        key = int(result.sequence_id)
        assert key not in self.finish and key not in self.errors, f"{result} after the end"
        assert key not in self.released, f"{result} after the release"
        assert result.num_computed >= self.num_computed.get(key, 0)
        self.num_computed[key] = result.num_computed
        if result.scores:
            assert key not in self.tokens, "the prompt is told before the output"
            self.scores.setdefault(key, []).extend(result.scores)
        if result.token is not None:
            self.tokens.setdefault(key, []).append(result.token)
        if result.finish is not None:
            self.finish[key] = result.finish
        if result.error is not None:
            self.errors[key] = result.error


def run_until_idle(loop: IterationLoop, collected: Collected | None = None, max_steps: int = 10_000) -> Collected:
    collected = collected or Collected()
    for _ in range(max_steps):
        step = loop.step()
        if step is None:
            return collected
        collected.add(step)
    raise AssertionError(f"not idle after {max_steps} steps")


class RecordingEngine(ScriptedEngine):
    def __init__(self, *, tokens_per_iteration: int = 256, max_sequences: int = 64, looks_ahead: bool = False) -> None:
        super().__init__(
            tokens_per_iteration=tokens_per_iteration, max_sequences=max_sequences, looks_ahead=looks_ahead
        )
        self.iterations: list[list[tuple[int, int, int]]] = []

    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        self.iterations.append([(part.sequence_id, part.start, part.num_tokens) for part in slices])
        super().submit(slices)
