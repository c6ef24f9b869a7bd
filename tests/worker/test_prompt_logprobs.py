"""Log-probabilities of prompts: each position once and in order, however the prompt is cut and the model is divided."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_shared.messages import SamplingParams, SequenceId, TokenLogprobs
from headrace_worker.iteration import MAX_TARGETS, Engine, SequenceSlice
from headrace_worker.loop import IterationLoop
from headrace_worker.sampling import NOT_FINITE
from headrace_worker.scoring import ROWS_AT_ONCE, score, targets_of
from tests.scripted_engine import ScriptedEngine, expected_output
from tests.worker.checkpoints import VOCAB_SIZE, load_tiny, prompt_of, save_checkpoint
from tests.worker.cuda.toy import toy_engine, toy_logits
from tests.worker.loop_builders import Collected, admission, run_until_idle
from tests.worker.parallel.thread_ranks import load_on_host_device, rank_threads

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

WANTED = 3
PROMPTS = [prompt_of(41, 1), prompt_of(1, 2), prompt_of(2, 3), prompt_of(90, 4)]


def run(engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, **of_admission: Any) -> Collected:
    loop = IterationLoop(engine)
    for number, prompt in enumerate(prompts):
        blocks = range(number * 14, number * 14 + 14)
        wanted = None if number == 2 else WANTED
        settings = {"max_tokens": 3, "temperature": 0.0, "num_prompt_logprobs": wanted, **of_admission}
        loop.admit(admission(number, list(prompt), blocks, **settings))
    collected = run_until_idle(loop)
    assert not collected.errors
    return collected


def reference(logits: torch.Tensor, prompt: Sequence[int]) -> list[TokenLogprobs]:
    """logits [positions, vocab_size] -> without ranks among equals in mind."""
    logprobs = torch.log_softmax(logits.double(), -1)
    found = []
    for position, token in enumerate(prompt[1:]):
        row = logprobs[position]
        rank = 1 + int((row > row[token]).sum())
        found.append(TokenLogprobs(float(row[token]), (), rank))
    return found


def assert_equal(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=2e-4)
        assert mine.rank == other.rank
        assert len(mine.top) == WANTED and [item.logprob for item in mine.top] == sorted(
            (item.logprob for item in mine.top), reverse=True
        )
        if mine.rank <= WANTED:
            assert mine.top[mine.rank - 1].logprob == mine.logprob


@pytest.mark.parametrize(
    "changes", [{"tokens_per_iteration": 256}, {"tokens_per_iteration": 16}, {"tokens_per_iteration": 7}]
)
def test_they_are_the_softmax_of_the_logits_however_the_prompt_is_cut(changes: dict[str, Any], tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, seed=3)
    collected = run(load_tiny(tmp_path, **changes))
    plain = run(load_tiny(tmp_path, **changes), num_prompt_logprobs=None)
    assert collected.tokens == plain.tokens and plain.scores == {}
    assert set(collected.scores) == {0, 3}, "one token follows nothing, and one prompt asked for nothing"
    for number in (0, 3):
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPTS[number]])).logits[0]
        assert_equal(collected.scores[number], reference(logits, PROMPTS[number]))


@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("device", [False, True], ids=["cpu", "asynchronous"])
def test_they_are_the_same_however_the_model_is_divided(
    tmp_path: Path, tensor_parallel: int, pipeline_parallel: int, device: bool
) -> None:
    save_checkpoint(tmp_path, seed=3)
    expected = run(load_tiny(tmp_path))
    changes: dict[str, Any] = {"load": load_on_host_device, "max_sequences": 6} if device else {}
    with rank_threads(tmp_path, tensor_parallel, pipeline_parallel, **changes) as engine:
        found = run(engine)
    assert found.tokens == expected.tokens
    assert set(found.scores) == set(expected.scores)
    for number, scores in expected.scores.items():
        assert_equal(found.scores[number], scores)


@pytest.mark.parametrize("tokens_per_iteration", [16, 5])
def test_an_asynchronous_engine_tells_the_same(tokens_per_iteration: int) -> None:
    engine, _ = toy_engine(tokens_per_iteration=tokens_per_iteration, context=56)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13] * 3, [3], [7, 7], [1, 2, 3, 4] * 5]
    collected = run(engine, [prompt[:40] for prompt in prompts])
    for number in (0, 3):
        logits = torch.cat([toy_logits(prompts[number][:end]) for end in range(1, len(prompts[number]))])
        assert_equal(collected.scores[number], reference(logits, prompts[number]))


@pytest.mark.timeout(300)
def test_compiled_kernels_tell_the_same(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    save_checkpoint(tmp_path, seed=3, head_dim=32, **sizes)
    expected = run(load_tiny(tmp_path, dtype="bfloat16", native="off"))
    found = run(load_tiny(tmp_path, dtype="bfloat16"))
    for number, scores in expected.scores.items():
        for mine, other in zip(found.scores[number], scores, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=0.35), "bfloat16"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), looks_ahead=st.booleans(), num_stages=st.integers(1, 3), max_drafts=st.sampled_from([0, 3]))
def test_each_position_is_told_once_and_in_order(
    data: st.DataObject, looks_ahead: bool, num_stages: int, max_drafts: int
) -> None:
    engine = ScriptedEngine(
        max_sequences=data.draw(st.integers(1, 5)),
        tokens_per_iteration=data.draw(st.integers(5, 200)),
        looks_ahead=looks_ahead,
        num_stages=num_stages,
        max_drafts=max_drafts,
    )
    submitted: list[int] = []
    submit = engine.submit

    def counted(slices: Sequence[SequenceSlice]) -> None:
        submitted.append(sum(len(piece.targets) for piece in slices))
        submit(slices)

    engine.submit = counted  # type: ignore[method-assign]  # looks on
    loop = IterationLoop(engine)
    lengths = data.draw(st.lists(st.integers(1, 220), min_size=1, max_size=6))
    for number, length in enumerate(lengths):
        prompt = list(range(100, 100 + length))
        loop.admit(
            admission(number, prompt, range(number * 16, number * 16 + 16), num_prompt_logprobs=number % 3, seed=number)
        )
    collected = run_until_idle(loop)
    for number, length in enumerate(lengths):
        scores = collected.scores.get(number, [])
        assert [entry.logprob for entry in scores] == [-position / 4 for position in range(1, length)]
        assert all(len(entry.top) == number % 3 for entry in scores)
        assert collected.tokens[number] == expected_output(list(range(100, 100 + length)), number, 0, 4)
    assert max(submitted) <= MAX_TARGETS


def test_an_attempt_that_came_to_an_output_tells_nothing_again() -> None:
    loop = IterationLoop(ScriptedEngine(checks=False))
    prompt = list(range(100, 110))
    output = expected_output(prompt, 0, 0, 2)
    loop.admit(admission(1, prompt, range(2), output=output, num_prompt_logprobs=1, num_cached=5))
    loop.admit(admission(2, prompt, range(2, 4), choice=1, num_prompt_logprobs=1))
    assert run_until_idle(loop).scores == {}


def test_a_prompt_that_is_partly_cached_cannot_be_told() -> None:
    loop = IterationLoop(ScriptedEngine())
    loop.admit(admission(1, list(range(100, 110)), range(2), num_prompt_logprobs=1, num_cached=5))
    collected = run_until_idle(loop)
    assert "all of it" in collected.errors[1] and collected.released == [1]


def test_logits_that_are_not_finite_are_an_error_of_the_sequence() -> None:
    logits = torch.randn(ROWS_AT_ONCE + 3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[ROWS_AT_ONCE + 1] = torch.nan
    pieces = [
        SequenceSlice(SequenceId(1), 0, ROWS_AT_ONCE, [], [], False, targets=[4] * ROWS_AT_ONCE),
        SequenceSlice(SequenceId(2), 0, 3, [], [], False, targets=[5, 6, 7]),
    ]
    targets = targets_of(pieces, lambda _: SamplingParams(seed=0, num_prompt_logprobs=2))
    items = targets.items(score(logits, torch.from_numpy(targets.tokens), targets.most))
    assert [item.error for item in items[-3:]] == [None, NOT_FINITE, None]
    assert {item.sequence_id for item in items[:-3]} == {1} and all(item.error is None for item in items[:-3])
