"""Schemas and grammars of clients: good ones become grammars, bad ones a 400, and none holds the router up."""

import asyncio
import json
import math
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace_router.grammar_checks import MAX_GROWTH_BYTES, MAX_WAITING_OF_ONE, PATIENCE_S, GrammarChecks
from headrace_router.grammar_process import CHECK_CPU_S, MAX_MEMORY_BYTES, grammar_of
from headrace_router.structured_output import FormKind, OutputForm
from headrace_router.syscall_filter import MACHINES
from headrace_shared.errors import InvalidRequest, Overloaded
from headrace_shared.grammars import (
    CHECKING_STACK_BYTES,
    MAX_KNOWN,
    MAX_KNOWN_BYTES,
    USING_STACK_BYTES,
    GrammarError,
    Grammars,
)
from headrace_shared.messages import SamplingParams
from headrace_worker.constraint import Constraint, Constraints
from tests.router.byte_card import CARD
from tests.worker.engine_driver import make_admission


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
    form("json", '{"$ref":"#"}'),
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


SLOW = form("regex", "a?" * 30_000)
"""For much longer than a second, in little memory."""


async def test_good_forms_become_grammars_and_bad_ones_are_refused(checks: GrammarChecks) -> None:
    for good in GOOD:
        assert await checks.check(CARD, good)
    for bad in BAD:
        with pytest.raises(InvalidRequest) as caught:
            await checks.check(CARD, bad)
        told = str(caught.value)
        assert caught.value.param == "field" and len(told) < 700 and "verbose" not in told, bad


async def test_what_explodes_is_refused_within_the_time_and_costs_nobody_else_anything(checks: GrammarChecks) -> None:
    await checks.check(CARD, GOOD[0])
    for hostile in (AMBIGUOUS, EXPONENTIAL):
        started_at = time.monotonic()
        with pytest.raises(InvalidRequest):
            await checks.check(CARD, hostile)
        assert time.monotonic() - started_at < PATIENCE_S + 60.0
    assert await checks.check(CARD, GOOD[1])


def statuses(pid: int) -> list[dict[str, str]]:
    """Of each thread, as the kernel tells."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [dict(line.split(":", 1) for line in (task / "status").read_text().splitlines()) for task in tasks]


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() not in MACHINES, reason="there is no filter for it")
async def test_all_threads_of_the_process_have_the_filter_of_system_calls(checks: GrammarChecks) -> None:
    await checks.check(CARD, GOOD[0])
    assert checks._helper is not None
    told = statuses(checks._helper.pid)
    assert len(told) > 1 and all(int(status["Seccomp"]) == 2 for status in told), "2: filtered"
    assert all(int(status["NoNewPrivs"]) == 1 for status in told)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux's")
async def test_each_form_may_grow_by_so_much_and_a_tokenizer_by_more(checks: GrammarChecks) -> None:
    others = [msgspec.structs.replace(CARD, model=f"other-{number}") for number in range(2)]
    found: list[int] = []
    for card in (CARD, *others):
        await checks.check(card, GOOD[0])
        assert checks._helper is not None
        soft, hard = resource.prlimit(checks._helper.pid, resource.RLIMIT_AS)
        taken = int(statuses(checks._helper.pid)[0]["VmSize"].split()[0]) << 10
        assert hard == MAX_MEMORY_BYTES and taken <= soft <= taken + MAX_GROWTH_BYTES + (64 << 20)
        found.append(soft)
        checks._helper.limit_growth(MAX_MEMORY_BYTES)
        assert resource.prlimit(checks._helper.pid, resource.RLIMIT_AS) == (hard, hard)
    assert all(soft < MAX_MEMORY_BYTES for soft in found)


async def test_a_tokenizer_that_is_the_name_of_a_file_is_not_read(checks: GrammarChecks, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(CARD.tokenizer)
    for name in (str(path), f" {path}", "byte", "", "[]"):
        with pytest.raises(InvalidRequest, match="not possible with this model"):
            await checks.check(msgspec.structs.replace(CARD, tokenizer=name.encode()), GOOD[0])
        with pytest.raises(GrammarError, match="no JSON"):
            Grammars(msgspec.structs.replace(CARD, tokenizer=name.encode())).compile(grammar_of("regex", "a"))
    assert await checks.check(msgspec.structs.replace(CARD, tokenizer=b"\n " + CARD.tokenizer), GOOD[0])
    await checks._stop()
    with pytest.raises(InvalidRequest, match="not possible with this model"):
        await checks.check(msgspec.structs.replace(CARD, tokenizer=str(path).encode()), GOOD[1])
    assert checks._helper is None, "that was known"


def stop(pid: int) -> None:
    """Returns when all its threads stand still: on a busy machine one may go on for a while."""
    os.kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    give_up_at = time.monotonic() + 30.0
    while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


async def test_a_process_that_hangs_is_replaced_and_that_is_no_fault_of_the_form(checks: GrammarChecks) -> None:
    checks._patience_s = 1.0
    await checks.check(CARD, GOOD[0])
    assert checks._helper is not None
    stop(checks._helper.pid)
    with pytest.raises(Overloaded):
        await checks.check(CARD, GOOD[1])
    checks._patience_s = PATIENCE_S
    assert await checks.check(CARD, GOOD[1])


async def test_a_process_that_somebody_kills_is_replaced_and_that_is_no_fault_of_the_form(
    checks: GrammarChecks,
) -> None:
    await checks.check(CARD, GOOD[0])
    assert checks._helper is not None
    stop(checks._helper.pid)
    asking = asyncio.create_task(checks.check(CARD, GOOD[1]))
    await asyncio.sleep(0.1)
    os.kill(checks._helper.pid, signal.SIGKILL)
    with pytest.raises(Overloaded):
        await asking
    assert await checks.check(CARD, GOOD[1])


async def test_what_takes_too_long_is_ended_by_processor_time_and_not_by_the_clock(checks: GrammarChecks) -> None:
    """Where another process had all the time meanwhile, the form is as good as before."""
    await checks.check(CARD, GOOD[0])
    helper = checks._helper
    assert helper is not None
    stop(helper.pid)
    asking = asyncio.create_task(checks.check(CARD, GOOD[1]))
    await asyncio.sleep(CHECK_CPU_S + 0.5)
    os.kill(helper.pid, signal.SIGCONT)
    assert await asking and checks._helper is helper
    with pytest.raises(InvalidRequest, match="more than 1 s"):
        await checks.check(CARD, SLOW)
    assert checks._helper is None


async def test_large_tokenizers_are_known_and_a_form_that_is_known_costs_no_look_at_them(
    checks: GrammarChecks,
) -> None:
    """Some have thirty megabytes."""
    card = msgspec.structs.replace(CARD, tokenizer=CARD.tokenizer + b" " * 34_000_000)
    least_s = {}
    for name, asked in (("small", CARD), ("large", card)):
        await checks.check(asked, GOOD[0])
        least_s[name] = math.inf
        for _ in range(50):
            started_at = time.thread_time()
            assert await checks.check(asked, GOOD[0])
            least_s[name] = min(least_s[name], time.thread_time() - started_at)
    assert least_s["large"] < 10 * least_s["small"], "to read all of it takes a hundred times as long"


async def test_verdicts_are_remembered(checks: GrammarChecks) -> None:
    first = await checks.check(CARD, GOOD[0])
    assert checks._helper is not None
    await checks._helper.kill()
    assert await checks.check(CARD, GOOD[0]) == first
    assert await checks.check(CARD, GOOD[1]), "a new process does it"


async def test_a_client_that_leaves_during_its_check_costs_nobody_anything(checks: GrammarChecks) -> None:
    await checks.check(CARD, GOOD[0])
    helper = checks._helper
    task = asyncio.create_task(checks.check(CARD, AMBIGUOUS))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    answers = await asyncio.gather(*(checks.check(CARD, each) for each in GOOD[1:]))
    assert len(set(answers)) == len(answers)
    assert checks._helper is helper, "others need not wait for a new one"


async def test_nothing_is_left_of_the_process(checks: GrammarChecks) -> None:
    await checks.check(CARD, GOOD[0])
    helper = checks._helper
    assert helper is not None
    await checks.close()
    with pytest.raises(ProcessLookupError):
        os.kill(helper.pid, 0)


def lark_rules(depth: int) -> OutputForm:
    """Rules that lead to each other."""
    rules = [f"r{number}: r{number + 1}" for number in range(depth)]
    return form("grammar", "\n".join(["start: r0", *rules, f'r{depth}: "a"']))


HOSTILE = {
    "many optional letters": SLOW,
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
        assert time.monotonic() - started_at < PATIENCE_S + 60.0, name
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
