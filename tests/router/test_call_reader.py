"""Function calls in text that comes in pieces: where it is cut makes no difference, and no text is lost."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_router.call_reader import MAX_LEAD_CHARS, CallReader
from headrace_router.tools import CallFormat, ToolUse

TAGGED, BARE, NAMED, ARGUMENTS = CallFormat.TAGGED, CallFormat.BARE, CallFormat.NAMED, CallFormat.ARGUMENTS
Calls = list[tuple[str, str]]
LONG = '{"q": "' + "x" * 40 + '", "deep": {"a": [1, {"b": "}]"}]}}'


def read(form: CallFormat, parts: Sequence[str], is_parallel: bool = True) -> tuple[str, Calls, list[str]]:
    """(text, calls, each piece of text)"""
    reader = CallReader(ToolUse(format=form, names=("f", "g"), is_parallel=is_parallel))
    texts: list[str] = []
    calls: list[list[str]] = []
    for number, part in enumerate(parts):
        found = reader.push(part, is_last=number == len(parts) - 1)
        texts.append(found.text)
        for piece in found.calls:
            assert (piece.name is not None) == (piece.number == len(calls)), "its name comes first, and once"
            if piece.name is not None:
                calls.append([piece.name, ""])
            calls[piece.number][1] += piece.arguments
    return "".join(texts), [(name, arguments) for name, arguments in calls], texts


CASES: list[tuple[CallFormat, str, str, Calls]] = [
    (TAGGED, "No call at all: {}", "No call at all: {}", []),
    (TAGGED, "", "", []),
    (TAGGED, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (TAGGED, f'<tool_call>{{"name":"g","arguments":{LONG}}}</tool_call>', "", [("g", LONG)]),
    (
        TAGGED,
        'First: <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"x": "</tool_call>"}}\n</tool_call>',
        "First: ",
        [("f", "{}"), ("g", '{"x": "</tool_call>"}')],
    ),
    (TAGGED, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    (TAGGED, '<tool_call>{"name": "f"}</tool_call> Done.', " Done.", [("f", "{}")]),
    (TAGGED, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (TAGGED, '<tool_call>{"name": "h", "arguments": {}}</tool_call>', "=", []),
    (TAGGED, '<tool_call>{"answer": 3}</tool_call>', "=", []),
    (TAGGED, "<tool_call> hello </tool_call>", "=", []),
    (TAGGED, "<tool_ca", "=", []),
    (TAGGED, '<tool_call>\n{"name": "f", "argu', "=", []),
    (TAGGED, '<tool_call>\n{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    (BARE, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (BARE, MAX_LEAD_CHARS * " " + '{"name": "f"}', "", [("f", "{}")]),
    (BARE, MAX_LEAD_CHARS * " " + ' {"name": "f"}', "=", []),
    (BARE, (MAX_LEAD_CHARS // 2) * ";\n" + '{"name": "f"}', "", [("f", "{}")]),
    (BARE, MAX_LEAD_CHARS * ";\n" + '{"name": "f"}', "=", []),
    (BARE, MAX_LEAD_CHARS * " " + "[TOOL_CALLS]", "=", []),
    (BARE, '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (BARE, '{"name":"f","parameters":{}}; {"name":"g","parameters":{"z":1}}', "", [("f", "{}"), ("g", '{"z":1}')]),
    (
        BARE,
        f'[{{"name": "f", "arguments": {LONG}}}, {{"name": "g", "arguments": {{}}}}]',
        "",
        [("f", LONG), ("g", "{}")],
    ),
    (BARE, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "\\""}}]', "", [("f", '{"a": "\\""}')]),
    (BARE, '\n{"name":"f","arguments":{}} and so on', "", [("f", "{}")]),
    (
        BARE,
        '{"name":"f","arguments":{}}; {"name": "x",{"name":"g","arguments":{"b":2}}',
        "",
        [("f", "{}"), ("g", '{"b":2}')],
    ),
    (BARE, '{"name":"f","arguments":{}} noise {"name":"g","arguments":{}}', "", [("f", "{}"), ("g", "{}")]),
    (BARE, 'Hello {"name": "f", "arguments": {}}', "=", []),
    (BARE, '{"answer": {"name": "f"}}', "=", []),
    (BARE, "[1, 2, 3]", "=", []),
    (BARE, "[TOOL", "=", []),
    (BARE, '{"name": "f", "description": "x"}', "=", []),
    (NAMED, '[TOOL_CALLS]f[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    (NAMED, f"Let me see.[TOOL_CALLS]g[CALL_ID]a1B2c3D4e[ARGS]{LONG}", "Let me see.", [("g", LONG)]),
    (
        NAMED,
        '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}\n [TOOL_CALLS]g{"\\"}": {"b": [{}]}}\n',
        "",
        [("f", '{"a": "[TOOL_CALLS]"}'), ("g", '{"\\"}": {"b": [{}]}}')],
    ),
    (NAMED, "[TOOL_CALLS] f [ARGS] {} Done. ", " Done. ", [("f", "{}")]),
    (NAMED, "No call: {}", "=", []),
    (NAMED, "[TOOL_CALLS]h[ARGS]{}", "=", []),
    (NAMED, "[TOOL_CALLS]f[ARGS", "=", []),
    (NAMED, "[TOOL_CALLS]f and so on " + "x" * 300, "=", []),
    (NAMED, "[TOOL_CALLS][TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]", [("f", "{}")]),
    (NAMED, '[TOOL_CALLS]f[ARGS]{"a": "cut', "", [("f", '{"a": "cut')]),
    (NAMED, "[TOOL", "=", []),
    (ARGUMENTS, '{"a": 1}', "", [("f", '{"a": 1}')]),
    (ARGUMENTS, "", "", []),
]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
def test_what_is_found(form: CallFormat, text: str, shown: str, calls: Calls) -> None:
    expected = (text if shown == "=" else shown, calls)
    assert read(form, [text])[:2] == expected
    assert read(form, list(text) or [""])[:2] == expected


@settings(max_examples=300)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 120), max_size=8))
def test_cuts_make_no_difference(case: tuple[CallFormat, str, str, Calls], cuts: list[int]) -> None:
    form, text, shown, calls = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[start:end] for start, end in pairwise(places)]
    assert read(form, parts)[:2] == (text if shown == "=" else shown, calls)


_PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "f",
        "{",
        "}",
        '"name"',
        ": ",
        '"f"',
        ", ",
        '"arguments"',
        "[",
        "]",
        "\n",
        "x",
        "\\",
        '"',
    ]
)


@settings(max_examples=500)
@given(st.sampled_from([TAGGED, BARE, NAMED]), st.lists(_PIECES, max_size=25))
def test_without_a_call_every_character_is_shown(form: CallFormat, pieces: list[str]) -> None:
    text, calls, _ = read(form, [*pieces, ""])
    assert calls or text == "".join(pieces)
    assert (text, calls) == read(form, ["".join(pieces)])[:2]


def test_arguments_and_text_come_as_they_are_written() -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {LONG}}}'
    reader = CallReader(ToolUse(format=TAGGED, names=("f",), is_parallel=True))
    pieces = [reader.push(char, is_last=False) for char in call]
    assert sum(bool(piece.calls) for piece in pieces) >= len(LONG) - 1
    shown = read(TAGGED, list("Plain text is not held back."))[2]
    assert shown == list("Plain text is not held back.")


def test_one_call_where_only_one_is_wanted() -> None:
    text = json.dumps([{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}])
    assert read(BARE, list(text), is_parallel=False)[1] == [("f", "{}")]


def test_a_call_within_what_was_taken_for_one_is_found_wherever_the_text_is_cut() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    text = f'<tool_call>{{"name": "f", "b{call} and'
    for step in (1, 7, 20, len(text)):
        reader = CallReader(ToolUse(format=CallFormat.TAGGED, names=("f",), is_parallel=True))
        shown, arguments = "", ""
        for start in range(0, len(text), step):
            found = reader.push(text[start : start + step], is_last=start + step >= len(text))
            shown += found.text
            arguments += "".join(piece.arguments for piece in found.calls)
        assert (shown, arguments) == ('<tool_call>{"name": "f", "b and', '{"a": 1}'), step
