"""The iteration loop on the scripted engine, which checks every slice and every block it is given."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace_shared.messages import Admission, BlockId, Extension, FinishReason, SequenceId
from headrace_worker.engine_frames import MAX_FRAME_BYTES
from headrace_worker.iteration import MAX_EMBEDDED, SampledToken, SequenceSlice
from headrace_worker.loop import IterationLoop
from headrace_worker.models.config import MOST
from tests.scripted_engine import BAD_TOKEN_AT, ERROR_AT, ScriptedEngine, expected_output
from tests.worker.loop_builders import Collected, RecordingEngine, admission, run_until_idle

PROMPT = list(range(100, 110))


@pytest.fixture(params=[False, True], ids=["one-at-a-time", "looks-ahead"])
def looks_ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_generates_the_scripts_tokens_and_releases(looks_ahead: bool) -> None:
    engine = ScriptedEngine(looks_ahead=looks_ahead)
    loop = IterationLoop(engine)
    loop.admit(admission(1, PROMPT, [0, 1], max_tokens=5, seed=3))
    collected = run_until_idle(loop)
    assert collected.tokens[1] == expected_output(PROMPT, 3, 0, 5)
    assert collected.finish == {1: FinishReason.LENGTH}
    assert collected.released == [1]
    assert collected.num_prefill_tokens == len(PROMPT)
    assert engine.num_sequences == 0 and loop.num_sequences == 0


def test_computed_positions_exclude_the_last_sampled_token(looks_ahead: bool) -> None:
    loop = IterationLoop(ScriptedEngine(looks_ahead=looks_ahead))
    loop.admit(admission(1, PROMPT, [0, 1], max_tokens=5))
    assert run_until_idle(loop).num_computed[1] == len(PROMPT) + 5 - 1


def test_decodes_come_first_and_prompts_fill_the_budget_in_admission_order() -> None:
    engine = RecordingEngine(tokens_per_iteration=8)
    loop = IterationLoop(engine)
    loop.admit(admission(1, PROMPT[:3], [0], max_tokens=9))
    assert loop.step() is not None
    loop.admit(admission(2, PROMPT, [1], max_tokens=2))
    loop.admit(admission(3, PROMPT[:4], [2], max_tokens=2))
    assert loop.step() is not None
    assert loop.step() is not None
    assert engine.iterations[1] == [(1, 3, 1), (2, 0, 7)]
    assert engine.iterations[2] == [(1, 4, 1), (2, 7, 3), (3, 0, 4)]


def test_no_more_sequences_in_an_iteration_than_the_engine_takes(looks_ahead: bool) -> None:
    engine = ScriptedEngine(max_sequences=3, looks_ahead=looks_ahead)
    loop = IterationLoop(engine)
    for number in range(1, 9):
        loop.admit(admission(number, PROMPT, [number], max_tokens=3, seed=number))
    collected = run_until_idle(loop)
    assert collected.tokens == {number: expected_output(PROMPT, number, 0, 3) for number in range(1, 9)}


def test_a_long_prompt_is_computed_in_chunks(looks_ahead: bool) -> None:
    loop = IterationLoop(ScriptedEngine(tokens_per_iteration=16, looks_ahead=looks_ahead))
    prompt = [number % 1000 for number in range(100)]
    loop.admit(admission(1, prompt, range(8), max_tokens=2))
    collected = run_until_idle(loop)
    assert collected.tokens[1] == expected_output(prompt, 0, 0, 2)
    assert collected.num_prefill_tokens == 100


def test_embeddings_of_an_iteration_fit_into_its_frame(looks_ahead: bool) -> None:
    engine = RecordingEngine(tokens_per_iteration=500, max_sequences=200, looks_ahead=looks_ahead)
    loop = IterationLoop(engine)
    for number in range(100):
        # Prompts of one token too, which else look like sequences that decode.
        plain = admission(number, PROMPT[: 1 + number % 3], [number], max_tokens=1)
        loop.admit(replace(plain, request=replace(plain.request, embeds=True)))
    loop.admit(admission(100, PROMPT, [100], max_tokens=3))
    collected = run_until_idle(loop)
    assert all(len(collected.tokens[number]) == 1 for number in range(100)) and len(collected.tokens[100]) == 3
    most = max(len([part for part in parts if part[0] < 100]) for parts in engine.iterations)
    assert most == MAX_EMBEDDED
    assert any(part[0] == 100 for part in engine.iterations[0]), "others are not held up"
    assert MAX_EMBEDDED * (4 * MOST["hidden_size"] + 64 * 1024) <= MAX_FRAME_BYTES


def test_stops_at_a_stop_token_and_discards_what_was_sampled_ahead(looks_ahead: bool) -> None:
    output = expected_output(PROMPT, 0, 0, 10)
    loop = IterationLoop(ScriptedEngine(looks_ahead=looks_ahead))
    loop.admit(admission(1, PROMPT, [0, 1], max_tokens=10, stop_token_ids=(output[3],)))
    collected = run_until_idle(loop)
    assert collected.tokens[1] == output[:4]
    assert collected.finish == {1: FinishReason.STOP}
    assert collected.released == [1]


def test_no_stop_token_before_min_tokens(looks_ahead: bool) -> None:
    output = expected_output(PROMPT, 0, 0, 10)
    loop = IterationLoop(ScriptedEngine(looks_ahead=looks_ahead))
    loop.admit(admission(1, PROMPT, [0, 1], max_tokens=10, min_tokens=6, stop_token_ids=(output[3], output[6])))
    collected = run_until_idle(loop)
    assert len(collected.tokens[1]) == 7
    assert output[3] not in collected.tokens[1]
    assert collected.finish == {1: FinishReason.STOP}


def test_ends_where_the_context_ends(looks_ahead: bool) -> None:
    loop = IterationLoop(ScriptedEngine(context=16, looks_ahead=looks_ahead))
    loop.admit(admission(1, PROMPT, [0], max_tokens=100))
    collected = run_until_idle(loop)
    assert len(collected.tokens[1]) == 6
    assert collected.finish == {1: FinishReason.LENGTH}


def test_waits_without_a_block_and_goes_on_when_one_comes(looks_ahead: bool) -> None:
    loop = IterationLoop(ScriptedEngine(looks_ahead=looks_ahead))
    loop.admit(admission(1, PROMPT, [0], max_tokens=20))
    loop.admit(admission(2, PROMPT, [1, 2], max_tokens=20, seed=2))
    collected = run_until_idle(loop)
    # Positions 0 … 15 fit into one block: the prompt's 10, then 6 tokens; the seventh is sampled from the last of them.
    assert collected.tokens[1] == expected_output(PROMPT, 0, 0, 7)
    assert len(collected.tokens[2]) == 20
    loop.extend(Extension(SequenceId(1), (BlockId(5),)))
    run_until_idle(loop, collected)
    assert collected.tokens[1] == expected_output(PROMPT, 0, 0, 20)
    assert sorted(collected.released) == [1, 2]


def test_a_release_is_confirmed_only_when_nothing_in_flight_has_the_sequence() -> None:
    loop = IterationLoop(ScriptedEngine(looks_ahead=True))
    loop.admit(admission(1, PROMPT, [0, 1], max_tokens=20))
    first = loop.step()
    assert first is not None
    loop.release(SequenceId(1))
    # One iteration is still in flight; it is collected without a word about the sequence, and then confirms it.
    second = loop.step()
    assert second is not None
    assert (second.sequences, second.released) == ([], [SequenceId(1)])
    assert loop.step() is None


def test_a_finish_is_reported_before_the_release_when_a_token_is_in_flight() -> None:
    stop = expected_output(PROMPT, 0, 0, 1)[0]
    loop = IterationLoop(ScriptedEngine(looks_ahead=True))
    loop.admit(admission(1, PROMPT, [0, 1], max_tokens=20, stop_token_ids=(stop,)))
    first = loop.step()
    assert first is not None
    assert (first.sequences[0].finish, first.released) == (FinishReason.STOP, [])
    second = loop.step()
    assert second is not None
    assert (second.sequences, second.released) == ([], [SequenceId(1)])


def test_unknown_and_repeated_releases_are_no_error(looks_ahead: bool) -> None:
    loop = IterationLoop(ScriptedEngine(looks_ahead=looks_ahead))
    loop.release(SequenceId(9))
    loop.admit(admission(1, PROMPT, [0, 1]))
    assert loop.step() is not None
    loop.release(SequenceId(1))
    loop.release(SequenceId(1))
    assert run_until_idle(loop).released == [1]


@pytest.mark.parametrize(("prompt", "error"), [([ERROR_AT, 2], "scripted error"), ([BAD_TOKEN_AT, 2], "vocabulary")])
def test_a_failing_sequence_ends_alone(prompt: list[int], error: str, looks_ahead: bool) -> None:
    loop = IterationLoop(ScriptedEngine(looks_ahead=looks_ahead))
    loop.admit(admission(1, prompt, [0], max_tokens=8))
    loop.admit(admission(2, PROMPT, [1, 2], max_tokens=8))
    collected = run_until_idle(loop)
    assert error in collected.errors[1]
    assert len(collected.tokens[1]) == 2
    assert collected.tokens[2] == expected_output(PROMPT, 0, 0, 8)
    assert sorted(collected.released) == [1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        admission(1, [], [0]),
        admission(1, PROMPT, [0], num_cached=10),
        admission(1, PROMPT, [256]),
        admission(1, PROMPT, [-1]),
        admission(1, PROMPT, [0], copies=((0, 256),)),
        admission(1, [4096], [0]),
        admission(1, list(range(4000)) + list(range(96)), range(256)),
    ],
    ids=["empty", "all-cached", "block-too-high", "block-negative", "copy", "token-id", "context"],
)
def test_an_impossible_admission_fails_alone(bad: Admission) -> None:
    loop = IterationLoop(ScriptedEngine())
    loop.admit(bad)
    loop.admit(admission(2, PROMPT, [1]))
    collected = run_until_idle(loop)
    assert 1 in collected.errors and 1 in collected.released
    assert len(collected.tokens[2]) == 4


def test_an_extension_by_blocks_that_do_not_exist_fails_the_sequence(looks_ahead: bool) -> None:
    loop = IterationLoop(ScriptedEngine(looks_ahead=looks_ahead))
    loop.admit(admission(1, PROMPT, [0], max_tokens=30))
    collected = run_until_idle(loop)
    loop.extend(Extension(SequenceId(1), (BlockId(256),)))
    run_until_idle(loop, collected)
    assert 1 in collected.errors and collected.released == [1]


def test_continues_from_the_output_of_an_earlier_attempt(looks_ahead: bool) -> None:
    whole = expected_output(PROMPT, 5, 1, 12)
    loop = IterationLoop(ScriptedEngine(looks_ahead=looks_ahead))
    loop.admit(admission(1, PROMPT, [0, 1], max_tokens=12, seed=5, choice=1, output=whole[:7]))
    collected = run_until_idle(loop)
    assert collected.tokens[1] == whole[7:]
    assert collected.num_prefill_tokens == len(PROMPT) + 7


def test_an_output_that_was_already_complete_just_finishes() -> None:
    whole = expected_output(PROMPT, 5, 0, 6)
    loop = IterationLoop(ScriptedEngine())
    loop.admit(admission(1, PROMPT, [0, 1], max_tokens=6, seed=5, output=whole))
    loop.admit(admission(2, PROMPT, [2, 3], max_tokens=9, seed=5, output=whole, stop_token_ids=(whole[-1],)))
    collected = run_until_idle(loop)
    assert collected.tokens == {}
    assert collected.finish == {1: FinishReason.LENGTH, 2: FinishReason.STOP}
    assert collected.released == [1, 2]


def test_a_cached_prefix_is_not_computed_again(looks_ahead: bool) -> None:
    engine = ScriptedEngine(looks_ahead=looks_ahead)
    loop = IterationLoop(engine)
    prompt = list(range(200, 240))
    loop.admit(admission(1, prompt, [0, 1, 2, 3], max_tokens=2))
    first = run_until_idle(loop)
    loop.admit(admission(2, prompt, [0, 1, 7], max_tokens=2, num_cached=39, copies=((2, 7),), seed=4))
    second = run_until_idle(loop)
    assert first.num_prefill_tokens == 40 and second.num_prefill_tokens == 1
    assert second.tokens[2] == expected_output(prompt, 4, 0, 2)


def test_reset_drops_everything_without_a_word(looks_ahead: bool) -> None:
    engine = ScriptedEngine(looks_ahead=looks_ahead)
    loop = IterationLoop(engine)
    loop.admit(admission(1, PROMPT, [0, 1], max_tokens=20))
    assert loop.step() is not None
    loop.reset()
    collected = Collected()
    run_until_idle(loop, collected)
    assert collected.tokens == {}
    loop.admit(admission(2, PROMPT, [0, 1], max_tokens=3))
    assert run_until_idle(loop).tokens[2] == expected_output(PROMPT, 0, 0, 3)
    assert engine.num_sequences == 0


def test_a_wrong_number_of_results_is_fatal() -> None:
    class ShortEngine(ScriptedEngine):
        def collect(self) -> list[SampledToken]:
            return super().collect()[:-1]

    loop = IterationLoop(ShortEngine())
    loop.admit(admission(1, PROMPT, [0]))
    with pytest.raises(RuntimeError, match="too few"):
        loop.step()


def test_idle_loop_has_nothing_to_say() -> None:
    assert IterationLoop(ScriptedEngine()).step() is None


class PipelineEngine(ScriptedEngine):
    """Notes how many iterations are outstanding, and how many sequences each of them decodes."""

    def __init__(self, num_stages: int, *, max_sequences: int = 64, tokens_per_iteration: int = 256) -> None:
        super().__init__(num_stages=num_stages, max_sequences=max_sequences, tokens_per_iteration=tokens_per_iteration)
        self.most_outstanding = 0
        self.sizes: list[int] = []

    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        super().submit(slices)
        self.most_outstanding = max(self.most_outstanding, len(self._outstanding))
        self.sizes.append(len(slices))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_pipeline_is_kept_full_with_equal_shares_of_the_sequences(num_stages: int) -> None:
    engine = PipelineEngine(num_stages)
    loop = IterationLoop(engine)
    for number in range(1, 13):
        loop.admit(admission(number, PROMPT, [2 * number, 2 * number + 1], max_tokens=6, seed=number))
    collected = run_until_idle(loop)
    assert collected.tokens == {number: expected_output(PROMPT, number, 0, 6) for number in range(1, 13)}
    assert engine.most_outstanding == num_stages
    assert set(engine.sizes) == {12 // num_stages}
    assert engine.num_sequences == 0


def test_chunks_of_one_prompt_follow_each_other_through_a_pipeline() -> None:
    engine = PipelineEngine(3, tokens_per_iteration=16)
    loop = IterationLoop(engine)
    prompt = [number % 1000 for number in range(100)]
    loop.admit(admission(1, prompt, range(8), max_tokens=3))
    assert loop.step() is not None
    assert engine.most_outstanding == 3
    assert run_until_idle(loop).tokens[1] == expected_output(prompt, 0, 0, 3)


def test_one_sequence_alone_takes_every_place_that_a_pipeline_has() -> None:
    loop = IterationLoop(PipelineEngine(4, max_sequences=1))
    loop.admit(admission(1, PROMPT, [0, 1], max_tokens=5))
    assert run_until_idle(loop).tokens[1] == expected_output(PROMPT, 0, 0, 5)
