"""Long lists of token ids come out of a body as any parser of JSON has them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router import number_lists
from headrace_router.number_lists import without_numbers
from headrace_router.parsing import MAX_PARSED_BYTES, parse_body, parse_long_body
from headrace_router.schemas import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody
from headrace_shared.errors import InvalidRequest

_IDS = st.lists(st.integers(-3, 10**21), max_size=40)


@given(
    st.one_of(_IDS.filter(bool), st.lists(_IDS, min_size=1, max_size=6)),
    st.sampled_from([(",", ":"), (" , ", " : "), (",\n\t", ":")]),
    st.integers(1, 60),
)
def test_wherever_pieces_are_cut(numbers: list[Any], separators: tuple[str, str], num_piece_bytes: int) -> None:
    body = {"model": "m[1,2]", "prompt": numbers, "x": {"prompt": [7]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(number_lists, "PIECE_BYTES", num_piece_bytes)
        rest, found = without_numbers(json.dumps(body, separators=separators).encode(), "prompt")
    assert found == numbers
    assert json.loads(rest) == {**body, "prompt": []}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "[1, 2]"}',
        b'{"prompt": ["1", "2"]}',
        b'{"prompt": [{"a": 1}]}',
        b'{"prompt": []}',
        b'{"prompt": [ ]}',
        b'{"other": [1]}',
        b'{"prompt": null}',
        b'{"prompt": [1, 2}',
        b'{"prompt": [1, 2,]}',
        b"[[1]]",
        b"\xff",
        b"",
        b"[" * 100_000,
    ],
)
def test_everything_else_is_left_to_the_parser(body: bytes) -> None:
    assert without_numbers(body, "prompt") == (body, None)


@pytest.mark.parametrize(
    "prompt",
    [
        [1, "2"],
        [1, 2.0],
        [1, True],
        [1, None],
        [1, [2]],
        [[1], 2],
        [[1], "2"],
        [[1], ["2,3"]],
        [[1, [2]]],
        [1, {"a": 2}],
    ],
)
@pytest.mark.parametrize("num_piece_bytes", [1, 1 << 15])
def test_what_is_no_number_is_refused_as_in_short_bodies(
    prompt: list[Any], num_piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(number_lists, "PIECE_BYTES", num_piece_bytes)
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    codes = []
    for parse in (parse_body, parse_long_body):
        with pytest.raises(InvalidRequest) as caught:
            parse(CompletionBody, body)
        assert (caught.value.param or "").startswith("prompt")
        codes.append(caught.value.code)
    assert codes[0] == codes[1] == "invalid_type"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [1, 2, 3], "n": 2}),
        (CompletionBody, {"prompt": [[1, 2], [3]]}),
        (CompletionBody, {"prompt": ["a", "b"]}),
        (CompletionBody, {"prompt": "a"}),
        (EmbeddingBody, {"input": [[1], [2, 3]]}),
        (EmbeddingBody, {"input": ["a"], "prompt": [1]}),
        (DetokenizeBody, {"tokens": [5, 6]}),
        (ChatBody, {"messages": [{"role": "user", "content": "a"}], "prompt": [1], "input": [1.5]}),
    ],
)
def test_long_bodies_are_parsed_as_short_ones(kind: type[Any], body: dict[str, Any]) -> None:
    data = json.dumps({"model": "m", **body}).encode()
    parsed, num_bytes = parse_long_body(kind, data)
    assert parsed == parse_body(kind, data)
    assert num_bytes > 50


def test_what_is_much_larger_in_memory_than_on_the_wire_is_refused() -> None:
    """One letter from beyond the usual plane, and each other takes four bytes."""
    num_chars = MAX_PARSED_BYTES // 4
    for content, is_refused in (("a" * num_chars, False), ("a" * num_chars + "\U0001f600", True)):
        data = json.dumps({"model": "m", "prompt": content}, ensure_ascii=False).encode()
        if not is_refused:
            assert parse_long_body(CompletionBody, data)[1] == pytest.approx(num_chars, rel=0.01)
            continue
        with pytest.raises(InvalidRequest) as caught:
            parse_long_body(CompletionBody, data)
        assert caught.value.code == "payload_too_large"
