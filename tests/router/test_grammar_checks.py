"""Schemas and grammars of clients: good ones become grammars, bad ones a 400, and none holds the router up."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace_router.grammar_checks import CHECK_S, GrammarChecks
from headrace_router.structured_output import FormKind, OutputForm
from headrace_shared.errors import InvalidRequest
from headrace_shared.messages import ModelCard


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


AMBIGUOUS = form("grammar", "start: " + " ".join(['("a" | "b" | start)?'] * 3000))
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


async def test_a_process_that_hangs_is_replaced(checks: GrammarChecks) -> None:
    await checks.check(CARD, GOOD[0])
    assert checks._process is not None
    os.kill(checks._process.pid, signal.SIGSTOP)
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
