"""Schemas and grammars of clients: good ones become grammars, bad ones a 400, and none holds the router up."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace_router.grammar_checks import CHECK_S, MAX_WAITING_OF_ONE, GrammarChecks
from headrace_router.grammar_process import grammar_of
from headrace_router.structured_output import FormKind, OutputForm
from headrace_shared.errors import InvalidRequest, Overloaded
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.grammars import (
    CHECKING_STACK_BYTES,
    MAX_KNOWN,
    MAX_KNOWN_BYTES,
    USING_STACK_BYTES,
    Grammars,
)
from headrace_shared.messages import SamplingParams
from headrace_worker.constraint import Constraint, Constraints
from tests.worker.engine_driver import make_admission


def _card() -> ModelCard:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return ModelCard(
        model="bytes",
        tokenizer=tokenizer.to_str().encode(),
        vocab_size=300,
        context=100,
        eos_token_ids=(len(alphabet),),
        created=1,
    )


CARD = _card()


@pytest.fixture
async def checks() -> AsyncIterator[GrammarChecks]:
    checks = GrammarChecks()
    yield checks
    await checks.close()


def form(kind: FormKind, text: str) -> OutputForm:
    return OutputForm(kind, text, "field")


GOOD = [
    form("json", '{"type":"object"}'),
    form("regex", r"\d+"),
    form("choice", '["yes","no"]'),
    form("grammar", 'root ::= "a" | "b" root'),
    form("grammar", 'start: "a" | "b" start'),
]
BAD = [
    form("json", '{"type":"objekt"}'),
    form("json", "[1]"),
    form("json", "{"),
    form("json", '{"type":"string","format":"no such format"}'),
    form("json", '{"$ref":"https://example.org/schema.json"}'),
    form("regex", "("),
    form("regex", r"(?=look)ahead"),
    form("grammar", "start: missing"),
    form("grammar", "%%%"),
]


AMBIGUOUS = form("grammar", "start: " + " ".join(['("a" | "b" | start)?'] * 1200))
EXPONENTIAL = form(
    "json",
    json.dumps(
        {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"a{i}_{j}": {"type": "string"}}} for j in range(12)]}
                for i in range(12)
            ]
        }
    ),
)


async def test_good_forms_become_grammars_and_bad_ones_are_refused(checks: GrammarChecks) -> None:
    for good in GOOD:
        assert await checks.check(CARD, good)
    for bad in BAD:
        with pytest.raises(InvalidRequest) as caught:
            await checks.check(CARD, bad)
        assert caught.value.param == "field" and len(str(caught.value)) < 700, bad


async def test_what_explodes_is_refused_within_the_time_and_costs_nobody_else_anything(checks: GrammarChecks) -> None:
    await checks.check(CARD, GOOD[0])
    for hostile in (AMBIGUOUS, EXPONENTIAL):
        started_at = time.monotonic()
        with pytest.raises(InvalidRequest):
            await checks.check(CARD, hostile)
        assert time.monotonic() - started_at < CHECK_S + 10.0
    assert await checks.check(CARD, GOOD[1])


def stop(pid: int) -> None:
    """Returns when all its threads stand still: on a busy machine one may go on for a while."""
    os.kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    give_up_at = time.monotonic() + 30.0
    while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


async def test_a_process_that_hangs_is_replaced(checks: GrammarChecks) -> None:
    await checks.check(CARD, GOOD[0])
    assert checks._process is not None
    stop(checks._process.pid)
    started_at = time.monotonic()
    with pytest.raises(InvalidRequest, match="more than 1 s"):
        await checks.check(CARD, GOOD[1])
    assert time.monotonic() - started_at < CHECK_S + 10.0
    assert await checks.check(CARD, GOOD[2])


async def test_verdicts_are_remembered(checks: GrammarChecks) -> None:
    first = await checks.check(CARD, GOOD[0])
    process = checks._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert await checks.check(CARD, GOOD[0]) == first
    assert await checks.check(CARD, GOOD[1]), "a new process does it"


async def test_a_client_that_leaves_during_its_check_costs_nobody_anything(checks: GrammarChecks) -> None:
    await checks.check(CARD, GOOD[0])
    process = checks._process
    task = asyncio.create_task(checks.check(CARD, AMBIGUOUS))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    answers = await asyncio.gather(*(checks.check(CARD, each) for each in GOOD[1:]))
    assert len(set(answers)) == len(answers)
    assert checks._process is process, "others need not wait for a new one"


async def test_nothing_is_left_of_the_process(checks: GrammarChecks) -> None:
    await checks.check(CARD, GOOD[0])
    process = checks._process
    assert process is not None
    await checks.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def lark_rules(depth: int) -> OutputForm:
    """Rules that lead to each other."""
    rules = [f"r{number}: r{number + 1}" for number in range(depth)]
    return form("grammar", "\n".join(["start: r0", *rules, f'r{depth}: "a"']))


HOSTILE = {
    "many optional letters": form("regex", "a?" * 30_000),
    "30,000 parentheses": form("regex", "(" * 30_000 + ")" * 30_000),
    "30,000 parentheses in Lark": form("grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "30,000 parentheses in GBNF": form("grammar", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    # Each token makes them larger: they fail in the middle of an answer, not when they are compiled.
    "repetitions of repetitions": form("regex", "(" * 9 + "a" + "{1,9999}){1,9999}" * 9),
    "fewer of them": form("regex", "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"),
    "beside something harmless": form("regex", "0|((((z{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"),
    "a chain of rules": lark_rules(3000),
    "circular references with siblings": form(
        "json", '{"$defs":{"a":{"allOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/a"}]}},"$ref":"#/$defs/a"}'
    ),
    "a million in an enumeration": form("json", json.dumps({"enum": list(range(1_000_000))})),
}
HARMLESS = {
    "a repetition of repetitions": form("regex", "(a{1,100}b){1,100}"),
    "nested quantifiers": form("regex", "(a+)+b"),
    "a hundred thousand repetitions": form("regex", "a{1,100000}"),
    "a reference to itself": form("json", '{"type":"object","properties":{"a":{"$ref":"#"}}}'),
    "many alternatives": form("regex", "|".join(f"a{number}" for number in range(9000))),
    "a long enumeration": form("json", json.dumps({"enum": [f"v{number}" for number in range(5000)]})),
    "a hundred levels": form("json", '{"items":' * 90 + "{}" + "}" * 90),
}


async def test_hostile_forms_are_refused_in_time_and_harmless_ones_are_not(checks: GrammarChecks) -> None:
    await checks.check(CARD, GOOD[0])
    for name, hostile in HOSTILE.items():
        started_at = time.monotonic()
        with pytest.raises(InvalidRequest):
            await checks.check(CARD, hostile)
        assert time.monotonic() - started_at < CHECK_S + 10.0, name
    for name, harmless in HARMLESS.items():
        assert await checks.check(CARD, harmless), name


async def test_one_caller_s_hostile_forms_leave_room_for_others(checks: GrammarChecks) -> None:
    await checks.check(CARD, GOOD[0])
    many = [lark_rules(3000 + number) for number in range(MAX_WAITING_OF_ONE + 3)]
    tasks = [asyncio.create_task(checks.check(CARD, each, "mallory")) for each in many]
    await asyncio.sleep(0)
    assert await checks.check(CARD, GOOD[0], "mallory"), "what is known is no work"
    asked = asyncio.create_task(checks.check(CARD, GOOD[1], "alice"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, Overloaded) for result in results) == 3
    assert sum(isinstance(result, InvalidRequest) for result in results) == MAX_WAITING_OF_ONE
    assert await asked


async def test_what_passes_has_more_stack_where_it_is_used(checks: GrammarChecks) -> None:
    """Whatever depth the first compilation just survives, the worker's has several times as much for it."""
    deepest = 0
    low, high = 100, 3000
    while high - low > 50:
        depth = (low + high) // 2
        try:
            await checks.check(CARD, lark_rules(depth))
        except InvalidRequest:
            high = depth
        else:
            low = deepest = depth
    assert deepest >= 200, "real grammars are not that deep"
    assert USING_STACK_BYTES >= 8 * CHECKING_STACK_BYTES
    constraints = Constraints(CARD, 1)
    for depth in (deepest, 4 * deepest):
        grammar = grammar_of("grammar", lark_rules(depth).text)
        sampling = SamplingParams(seed=1, grammar=grammar)
        constraint = constraints.of(make_admission([1], sampling))
        assert isinstance(constraint, Constraint) and constraint.matcher is not None, "the process is still there"


def test_compiled_grammars_that_are_kept_are_bounded_by_their_size() -> None:
    grammars = Grammars(CARD)
    for number in range(40):
        grammars.compile(grammar_of("regex", f"{number}" + "x" * 30_000))
        assert sum(map(len, grammars._known)) == grammars._num_known_bytes <= MAX_KNOWN_BYTES
    assert 10 < len(grammars._known) < 20
    for number in range(100):
        grammars.compile(grammar_of("regex", f"{number}"))
        assert len(grammars._known) <= MAX_KNOWN
