"""Tokens under a grammar: what is drawn is what it allows, whoever shares the batch."""

import json
import re
from collections.abc import Sequence
from functools import cache
from threading import Event
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from msgspec.structs import replace
from tokenizers import Tokenizer

from headrace_shared import grammars
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import GRAMMAR_FAILED, SamplingParams
from headrace_worker.constraint import Constraint, Constraints
from headrace_worker.models.card import card_from_gguf
from headrace_worker.models.gguf import GgufFile
from headrace_worker.models.source import find_model
from headrace_worker.sampling import SamplingState, sample
from tests.worker.engine_driver import make_admission

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

DATE = grammar_from("regex", r"20[0-9]{2}-[01][0-9]")
YES_OR_NO = grammar_from("choice", '["yes", "no, never"]')
PERSON = LLMatcher.grammar_from_json_schema(
    json.dumps(
        {
            "type": "object",
            "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
            "required": ["kind", "age"],
            "additionalProperties": False,
        }
    ),
    overrides={"whitespace_flexible": False},  # at random logits there would be no end of blanks
)


@cache
def card() -> ModelCard:
    return card_from_gguf(GgufFile(find_model("smollm2-135m").path), name="m", vocab_size=49152, context=64)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_buffer(card().tokenizer)


@cache
def constraints() -> Constraints:
    return Constraints(card(), 1)


def state(grammar: str, seed: int = 1, output: Sequence[int] = (), temperature: float = 1.0) -> SamplingState:
    params = SamplingParams(seed=seed, temperature=temperature, grammar=grammar)
    admission = make_admission([5, 6], params, output=output)
    return SamplingState(admission, card().vocab_size, constraints().of(admission))


def logits(rows: int, step: int) -> torch.Tensor:
    return torch.randn(rows, card().vocab_size, generator=torch.Generator().manual_seed(step))


def run(states: list[SamplingState], num_steps: int, first_step: int = 0) -> list[list[int]]:
    """Tokens up to the end of sequence, of each state."""
    tokens: list[list[int]] = [[] for _ in states]
    for step in range(first_step, first_step + num_steps):
        rows = [row for row in range(len(states)) if card().eos_token_ids[0] not in tokens[row]]
        if not rows:
            break
        drawn = sample(logits(len(states), step)[rows], [states[row] for row in rows], constraints())
        for row, item in zip(rows, drawn, strict=True):
            assert item.error is None
            tokens[row].append(item.token)
    return tokens


def text(tokens: Sequence[int]) -> str:
    assert tokens[-1] == card().eos_token_ids[0], "not at its end"
    return str(tokenizer().decode(list(tokens[:-1]), skip_special_tokens=False))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whatever_the_logits_say_the_text_is_what_the_grammar_allows(temperature: float) -> None:
    for seed in range(4):
        states = [state(grammar, seed, temperature=temperature) for grammar in (DATE, YES_OR_NO, PERSON)]
        date, choice, person = map(text, run(states, 60, first_step=100 * seed))
        assert re.fullmatch(r"20[0-9]{2}-[01][0-9]", date)
        assert choice in ("yes", "no, never")
        value = json.loads(person)
        assert value["kind"] in ("cat", "dog") and 0 <= value["age"] <= 30 and len(value) == 2


def test_a_batch_mate_without_a_grammar_gets_the_token_it_gets_alone() -> None:
    params = SamplingParams(seed=9, temperature=1.0)
    rows = logits(2, 3)
    alone = sample(rows[:1], [SamplingState(make_admission([1], params), card().vocab_size)])
    together = sample(rows, [SamplingState(make_admission([1], params), card().vocab_size), state(DATE)], constraints())
    assert together[0] == alone[0]


def test_a_sequence_that_has_moved_goes_on_where_it_was() -> None:
    whole = run([state(PERSON, 7)], 60)[0]
    for cut in (1, 3, len(whole) - 1):
        moved = state(PERSON, 7, output=whole[:cut])
        assert run([moved], 60, first_step=cut)[0] == whole[cut:]


def test_a_state_ahead_knows_its_drafts_and_leaves_the_state_as_it_is() -> None:
    first = state(DATE)
    tokens = run([state(DATE)], 3)[0]
    ahead = first.after(tokens[:2])
    assert sample(logits(1, 2), [ahead], constraints())[0].token == tokens[2]
    assert run([first], 1)[0] == tokens[:1]
    wrong = first.after([card().eos_token_ids[0]])
    assert wrong.problem is not None and first.problem is None


def test_a_grammar_that_cannot_be_used_fails_its_own_sequence_alone() -> None:
    for grammar in ("start: missing", grammar_from("json_schema", json.dumps({"type": "nonsense"}))):
        drawn = sample(logits(2, 1), [state(grammar), state(DATE)], constraints())
        assert drawn[0].error is not None and drawn[1].error is None
        assert drawn[1].token == sample(logits(2, 1)[1:], [state(DATE)], constraints())[0].token


def test_a_grammar_that_blows_up_on_the_way_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which letters there were is something to remember: each new row of them is a state of its own."""
    monkeypatch.setattr(grammars, "MAX_LEXER_STATES", 100)
    own = Constraints(card(), 1)
    admission = make_admission([5, 6], SamplingParams(seed=1, grammar=grammar_from("regex", "(a|b)*a(a|b){14}")))
    exploding = SamplingState(admission, card().vocab_size, own.of(admission))
    errors: list[str | None] = []
    for step in range(100):
        rows = torch.full((1, card().vocab_size), -10.0)
        rows[0, tokenizer().token_to_id("ab"[bin(step).count("1") % 2])] = 10.0
        errors.append(sample(rows, [exploding], own)[0].error)
        if errors[-1] is not None:
            break
    assert errors[0] is None and len(errors) > 2, "it began well"
    assert errors[-1] is not None and errors[-1].startswith(GRAMMAR_FAILED)


def test_a_problem_does_not_quote_what_the_user_wrote() -> None:
    big = {"type": "object", "properties": {f"secret{n}": {"type": "string"} for n in range(3000)}}
    broken = state(grammar_from("json_schema", json.dumps(big)))
    problem = broken.problem
    assert problem is not None and "secret" not in problem


def test_the_tokenizer_is_read_before_anybody_comes_with_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread of Python runs while it is: with the first grammar all streams would stop."""
    read = Event()
    made: list[LLTokenizer] = []

    def make(*arguments: Any, **more: Any) -> LLTokenizer:
        made.append(LLTokenizer(*arguments, **more))
        read.set()
        return made[-1]

    monkeypatch.setattr(grammars, "LLTokenizer", make)
    own = Constraints(card(), 1)
    assert read.wait(60)
    limit = own.of(make_admission([5, 6], SamplingParams(seed=1, grammar=DATE)))
    assert isinstance(limit, Constraint) and limit.matcher is not None
    assert len(made) == 1


def test_a_tokenizer_that_is_of_no_use_is_told_to_who_brings_a_grammar() -> None:
    own = Constraints(replace(card(), tokenizer=b"no JSON"), 1)
    limit = own.of(make_admission([5, 6], SamplingParams(seed=1, grammar=DATE)))
    assert isinstance(limit, Constraint) and limit.matcher is None
    assert limit.problem is not None and "tokenizer" in limit.problem
