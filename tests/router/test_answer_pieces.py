"""Texts and calls in the order in which the model wrote them, however the answer is cut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace_router.answer_pieces import AnswerPieces, ArgumentsPiece, CallBegins, TextPiece, part_id
from headrace_router.choices import Delta, TokenText
from headrace_router.tools import CallFormat, ToolUse
from headrace_shared.messages import FinishReason, TokenLogprobs

USE = ToolUse(format=CallFormat.TAGGED, names=("f", "g"), is_parallel=True)
TEXT = (
    'First.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call> then\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)
PARTS = ["First.", ("f", '{"a": 1}'), " then\n", ("g", "{}")]


def deltas(text: str, cuts: set[int]) -> list[Delta]:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    parts = [text[start:end] for start, end in pairwise(edges)]
    return [Delta(part, finish=FinishReason.STOP if i == len(parts) - 1 else None) for i, part in enumerate(parts)]


def parts_of(use: ToolUse | None, given: list[Delta]) -> list[str | tuple[str, str]]:
    pieces = AnswerPieces(use)
    parts: list[str | tuple[str, str]] = []
    for delta in given:
        for piece in pieces.push(delta):
            last = parts[-1] if parts else None
            match piece:
                case TextPiece(text=text) if isinstance(last, str):
                    parts[-1] = last + text
                case TextPiece(text=text):
                    parts.append(text)
                case CallBegins(name=name):
                    parts.append((name, ""))
                case ArgumentsPiece(text=text):
                    assert isinstance(last, tuple)
                    parts[-1] = (last[0], last[1] + text)
    return parts


@given(st.sets(st.integers(1, len(TEXT) - 1)))
def test_where_the_answer_is_cut_makes_no_difference(cuts: set[int]) -> None:
    assert parts_of(USE, deltas(TEXT, cuts)) == PARTS


def test_without_tools_all_is_text() -> None:
    assert parts_of(None, deltas(TEXT, {5, 9})) == [TEXT]


def test_calls_that_are_not_wanted_leave_no_part() -> None:
    use = ToolUse(format=CallFormat.TAGGED, names=("f", "g"), is_parallel=False)
    assert parts_of(use, deltas(TEXT, {40})) == ["First.", ("f", '{"a": 1}'), " then\n"]


def test_tokens_come_with_their_text_and_those_of_calls_with_none() -> None:
    def token(number: int) -> TokenText:
        return TokenText(number, 0, TokenLogprobs(-1.0, ()))

    pieces = AnswerPieces(USE)
    given = [Delta("a<tool", (token(1), token(2))), Delta("s", (token(3),))]
    texts = [piece for delta in given for piece in pieces.push(delta)]
    assert texts == [TextPiece("a", (token(1), token(2))), TextPiece("<tools", (token(3),))]
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    told = list(pieces.push(Delta(call + "z", (token(4), token(5)), FinishReason.STOP)))
    assert told == [CallBegins(0, "f"), ArgumentsPiece("{}"), TextPiece("z", ())]


def test_ids_depend_on_the_answer_and_the_part_only() -> None:
    ids = {part_id(prefix, answer, number) for prefix in ("a", "b") for answer in ("x", "y") for number in (0, 1)}
    assert len(ids) == 8 and part_id("a", "x", 0) in ids and all(len(made) == 26 for made in ids)
