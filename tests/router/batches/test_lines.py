"""Lines are found wherever the file is cut, and each bad one is named."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router.batches.lines import MAX_LINE_BYTES, BadLine, LineChecker, LineSplitter, parse_line

URL = "/v1/completions"


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    told = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "m", "prompt": "x"}} | changes
    return json.dumps({key: value for key, value in told.items() if value is not ...}).encode()


def split(data: bytes, cuts: list[int]) -> list[tuple[int, bytes | None]]:
    splitter, lines = LineSplitter(), []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        lines += splitter.feed(data[start:end])
    return lines + splitter.end()


def check(data: bytes, max_lines: int = 100, max_errors: int = 100) -> LineChecker:
    checker = LineChecker(URL, max_lines, max_errors)
    for start in range(0, len(data), 1000):
        checker.feed(data[start : start + 1000])
    checker.end()
    return checker


@given(st.lists(st.sampled_from([b"a", b"bb", b"", b"  ", b"\r"])), st.booleans(), st.lists(st.integers(0, 99)))
def test_lines_are_found_wherever_the_file_is_cut(lines: list[bytes], is_ended: bool, cuts: list[int]) -> None:
    data = b"\n".join(lines) + (b"\n" if is_ended else b"")
    expected = [(number, text.strip()) for number, text in enumerate(lines, 1) if text.strip()]
    assert split(data, cuts) == expected


@given(st.lists(st.integers(0, 99)))
def test_a_byte_order_mark_may_stand_at_the_beginning_and_nowhere_else(cuts: list[int]) -> None:
    mark = b"\xef\xbb\xbf"
    assert split(mark + b"a\n" + mark + b"b", cuts) == [(1, b"a"), (2, mark + b"b")]
    assert split(mark + b"\n", cuts) == []


def test_a_line_that_is_too_long_is_not_kept() -> None:
    data = b"a\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\nb\n" + b"y" * (2 * MAX_LINE_BYTES)
    cuts = list(range(0, len(data), 100_000))
    assert split(data, cuts) == split(data, []) == [(1, b"a"), (2, None), (3, b"b"), (4, None)]
    splitter = LineSplitter()
    for _ in range(100):
        splitter.feed(b"x" * 1_000_000)
        assert len(splitter._rest) <= MAX_LINE_BYTES


def test_a_body_stays_as_it_was_written() -> None:
    text = b'{"custom_id":"\xc3\xa4","method":"POST","url":"/v1/completions","body":{ "model":"m", "n" : 1e0 },"x":1}'
    parsed = parse_line(7, text, URL)
    assert parsed == (7, "ä", b'{ "model":"m", "n" : 1e0 }')


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (None, "line_too_long", None),
        (b"{", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_line", None),
        (line(body="@").replace(b'"@"', b"[" * 100_000), "invalid_json_line", None),
        (b"[]", "invalid_line", None),
        (b"1", "invalid_line", None),
        (line(custom_id=...), "invalid_line", None),
        (line(custom_id=1), "invalid_line", None),
        (line(body=...), "invalid_line", None),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "mismatched_url", "url"),
        (line(body=[]), "invalid_body", "body"),
        (line(body="x"), "invalid_body", "body"),
        (line(body={"model": 1}), "invalid_body", "body"),
        (line(body={"prompt": "x"}), "missing_required_parameter", "body.model"),
        (line(body={"model": "m", "stream": True}), "invalid_body", "body.stream"),
        (line(body={"model": "m", "stream": "yes"}), "invalid_body", "body.stream"),
        (line(body={"model": "m", "background": True}), "invalid_body", "body.background"),
    ],
)
def test_bad_lines_are_named(text: bytes | None, code: str, param: str | None) -> None:
    with pytest.raises(BadLine) as caught:
        parse_line(5, text, URL)
    error = caught.value.error
    assert (error.code, error.param, error.line) == (code, param, 5) and len(error.message) < 300


@given(st.binary(max_size=200))
def test_any_line_is_parsed_or_named(text: bytes) -> None:
    try:
        parse_line(1, text, URL)
    except BadLine as bad:
        assert bad.error.line == 1


def test_all_errors_of_a_file_are_found() -> None:
    data = b"\n".join([line("a"), b"", line("b", url="/x"), line("a"), b"nonsense", line("c")])
    checker = check(data)
    assert checker.num_lines == 5
    told = [(error.line, error.code) for error in checker.errors]
    assert told == [(3, "mismatched_url"), (4, "duplicate_custom_id"), (5, "invalid_json_line")]
    assert check(b"").errors[0].code == check(b"\n \n").errors[0].code == "empty_file"
    assert not check(line("a") + b"\n" + line("b")).errors


def test_checking_ends_when_enough_is_known() -> None:
    bad = b"nonsense\n" * 1000
    assert len(check(bad, 5000, 7).errors) == 7
    good = b"\n".join(line(str(n)) for n in range(20))
    assert not check(good, 20).errors
    error = check(good, 19).errors[-1]
    assert (error.code, error.line) == ("too_many_lines", 20)


def test_blank_lines_count_for_how_much_is_looked_at() -> None:
    """Each costs time, whatever is in it."""
    checker = LineChecker(URL, 100, 100)
    checker.feed(b"\n" * 10_000_000)
    assert checker.has_seen_enough and checker._splitter.num_lines < 100_000
    checker.feed(line("a") + b"\n")
    checker.end()
    assert [(error.code, error.line) for error in checker.errors] == [("too_many_lines", 101)]
    assert checker.num_lines == 0
    assert not check(b"\n" * 99 + line("a")).errors
