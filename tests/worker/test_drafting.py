"""Draft tokens: what is guessed, and that guessing changes nothing but the number of iterations."""

import pytest

from headrace_shared.messages import SamplingParams, TokenLogprobs
from headrace_worker.config import EngineConfig
from headrace_worker.drafting import PromptLookup
from headrace_worker.engine import load
from headrace_worker.iteration import EngineFacts
from headrace_worker.loop import IterationLoop
from headrace_worker.torch_engine import TorchEngine
from tests.scripted_engine import ECHO, ScriptedEngine, expected_output
from tests.worker.engine_driver import make_admission
from tests.worker.loop_builders import Collected, admission, run_until_idle


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([], 4, []),
        ([1, 2], 4, []),
        ([1, 2, 3, 1, 2], 4, [3, 1, 2]),
        ([1, 2, 3, 1, 2], 1, [3]),
        ([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 2, [5, 8]),  # the longest match, not the latest
        ([1, 2, 5, 1, 2, 6, 1, 2], 2, [6, 1]),  # the latest of equals
        ([1, 2, 3, 4], 4, []),
        ([5, 5, 5], 3, [5]),
    ],
)
def test_drafts_are_what_followed_the_same_tokens_before(tokens: list[int], most: int, drafts: list[int]) -> None:
    assert PromptLookup().draft(tokens, most) == drafts


@pytest.mark.parametrize("most_positions", [8192, 13, 1])
@pytest.mark.parametrize("step", [1, 3, 20])
def test_the_index_grows_with_the_sequence(step: int, most_positions: int) -> None:
    tokens = [number * number % 11 for number in range(200)]
    grown = PromptLookup(most_positions)
    for length in range(0, len(tokens), step):
        assert grown.draft(tokens[:length], 5) == PromptLookup(most_positions).draft(tokens[:length], 5)


def test_only_the_latest_tokens_are_looked_up() -> None:
    tokens = [1, 2, 3, *range(10, 20), 1, 2]
    assert PromptLookup(len(tokens) - 2).draft(tokens, 1) == [3]
    assert PromptLookup(len(tokens) - 3).draft(tokens, 1) == []
    lookup = PromptLookup(50)
    for length in range(0, 3000, 7):
        lookup.draft(range(length), 4)
    assert len(lookup._followed) <= 3 * 50


def test_right_guesses_save_iterations_and_wrong_ones_cost_none() -> None:
    repeating = [ECHO, 11, 12, 13, 14, 15]
    steps = {}
    for max_drafts in (0, 4):
        loop = IterationLoop(ScriptedEngine(max_drafts=max_drafts))
        loop.admit(admission(1, repeating, range(8), max_tokens=60))
        loop.admit(admission(2, [1, 2, 3, 1, 2], range(8, 16), max_tokens=20))
        collected, steps[max_drafts] = Collected(), 0
        while (step := loop.step()) is not None:
            collected.add(step)
            steps[max_drafts] = step.num_iterations
        assert collected.tokens[1] == expected_output(repeating, 0, 0, 60)
        assert collected.tokens[2] == expected_output([1, 2, 3, 1, 2], 0, 0, 20)
    assert steps[4] < steps[0] / 2


def test_an_engine_that_looks_ahead_gets_no_drafts() -> None:
    loop = IterationLoop(ScriptedEngine(max_drafts=4, looks_ahead=True))
    loop.admit(admission(1, [ECHO, 11, 12], range(8), max_tokens=40))
    assert run_until_idle(loop).tokens[1] == expected_output([ECHO, 11, 12], 0, 0, 40)


class Unguessing(TorchEngine):
    """The same engine, which is handed no drafts."""

    def __init__(self, engine: TorchEngine) -> None:
        self.__dict__.update(engine.__dict__)

    @property
    def facts(self) -> EngineFacts:
        return super().facts._replace(max_drafts=0)


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    engine = load(EngineConfig(context=512, num_blocks=256, speculative_tokens=6), lambda stage, current, total: None)
    assert isinstance(engine, TorchEngine)
    return engine


PROMPT = "name: Ada, born: 1815\nname: Alan, born: 1912\nname: Grace, born: 1906\nname: Ada, born:"
PARAMS = {
    "greedy": SamplingParams(seed=1, temperature=0.0),
    "sampled": SamplingParams(seed=2, temperature=0.8, top_p=0.95),
    "penalized": SamplingParams(seed=3, temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.3),
    "logprobs": SamplingParams(seed=4, temperature=0.5, num_logprobs=2),
}


@pytest.mark.model
def test_guessing_changes_no_token_of_the_real_model(engine: TorchEngine) -> None:
    """Greedy and sampled, alone and together: sampling is a function of logits and position, and the logits of a
    position do not depend on how many are computed at once."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_buffer(engine.facts.card.tokenizer).encode(PROMPT).ids

    def generate(engine: TorchEngine) -> tuple[Collected, list[TokenLogprobs | None], int]:
        loop = IterationLoop(engine)
        for number, params in enumerate(PARAMS.values()):
            blocks = range(number * 16, number * 16 + 16)
            loop.admit(make_admission(ids, params, sequence_id=number + 1, block_ids=blocks, choice=0))
        collected = Collected()
        logprobs: list[TokenLogprobs | None] = []
        num_iterations = 0
        while len(collected.tokens) < len(PARAMS) or min(map(len, collected.tokens.values())) < 80:
            step = loop.step()
            assert step is not None
            collected.add(step)
            logprobs += [row.logprobs for row in step.sequences if row.sequence_id == len(PARAMS)]
            num_iterations += 1
        loop.reset()
        return collected, logprobs, num_iterations

    plain, plain_logprobs, num_plain = generate(Unguessing(engine))
    guessed, guessed_logprobs, num_guessed = generate(engine)
    for number, name in enumerate(PARAMS, 1):
        assert guessed.tokens[number][:80] == plain.tokens[number][:80], name
    assert num_guessed < num_plain
    assert guessed_logprobs[:80] == plain_logprobs[:80] and None not in plain_logprobs[:80]
