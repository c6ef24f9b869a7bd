"""Forms come out as they were put in, however they are cut, and what is none is refused within bounds."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router.files.multipart import (
    MAX_HEAD_BYTES,
    MAX_PARTS,
    Event,
    MultipartParser,
    PartBegin,
    PartData,
    PartEnd,
    boundary_of,
)
from headrace_shared.errors import InvalidRequest

BOUNDARY = b"xyz"
END = b"--xyz--\r\n"
Part = tuple[str, str | None, bytes]


def head(name: str, filename: str | None = None) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"'
    return f'--xyz\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()


def written(parts: list[Part]) -> bytes:
    return b"".join(head(name, filename) + content + b"\r\n" for name, filename, content in parts) + END


def parts_of(events: list[Event]) -> list[Part]:
    parts: list[Part] = []
    is_open = False
    for event in events:
        if isinstance(event, PartBegin):
            assert not is_open
            parts.append((event.name, event.filename, b""))
            is_open = True
        elif isinstance(event, PartData):
            assert is_open and event.data
            name, filename, content = parts[-1]
            parts[-1] = (name, filename, content + event.data)
        else:
            assert isinstance(event, PartEnd) and is_open
            is_open = False
    assert not is_open
    return parts


def parse(data: bytes, cuts: list[int] | None = None) -> list[Part]:
    parser, events = MultipartParser(BOUNDARY), []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts or ()), len(data)]
    for start, end in itertools.pairwise(edges):
        events += parser.feed(data[start:end])
    assert parser.is_complete
    return parts_of(events)


# Contents that look like boundaries, as often as possible.
contents = st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"-", b"--", b"--xy", b"x", b"y", b"\r\n--xy", b"a"])).map(
    b"".join
)
names = st.text(st.characters(codec="utf-8", exclude_characters='"\\\r\n%', exclude_categories=["C"]), max_size=20)


@given(
    st.lists(st.tuples(names.filter(bool), st.none() | names, contents), min_size=1, max_size=6),
    st.lists(st.integers(0, 2000), max_size=30),
    contents,
)
def test_what_was_written_is_read_wherever_it_is_cut(parts: list[Part], cuts: list[int], epilogue: bytes) -> None:
    good = [(name, filename, content) for name, filename, content in parts if b"\r\n--xyz" not in b"\r\n" + content]
    if good:
        assert parse(written(good) + epilogue, cuts) == good


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_anything_else_is_refused_or_incomplete(data: bytes, cuts: list[int]) -> None:
    parser = MultipartParser(BOUNDARY)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    try:
        for start, end in itertools.pairwise(edges):
            parser.feed(data[start:end])
    except InvalidRequest as error:
        assert error.code == "invalid_multipart"


def test_content_is_handed_on_at_once() -> None:
    parser = MultipartParser(BOUNDARY)
    parser.feed(head("file", "a"))
    for _ in range(10):
        events = parser.feed(bytes(100_000))
        assert sum(len(event.data) for event in events if isinstance(event, PartData)) > 99_900
    assert not parser.is_complete


def test_a_preamble_blanks_behind_a_boundary_and_other_headers_are_passed_over() -> None:
    data = b'hello\r\n--xyz  \r\nContent-Type: a/b\r\ncontent-disposition: form-data; NAME=a; filename="b"\r\n\r\n1\r\n'
    assert parse(data + END) == [("a", "b", b"1")]


@pytest.mark.parametrize(
    ("written_as", "meant"),
    [('a\\"b', 'a"b'), ("a%22b", 'a"b'), ("a\\\\b", "a\\b"), ("C:\\x", "C:\\x"), ("ü; name=x", "ü; name=x"), ("", "")],
)
def test_filenames_are_unquoted(written_as: str, meant: str) -> None:
    assert parse(head("file", written_as) + b"\r\n" + END) == [("file", meant, b"")]


@pytest.mark.parametrize(
    "data",
    [
        END,
        b"x" * 5000,
        b"--xyzz\r\n\r\n",
        b"--xyz\r\n\r\nno disposition\r\n" + END,
        b"--xyz\r\nContent-Disposition: attachment; name=a\r\n\r\n\r\n" + END,
        b"--xyz\r\nContent-Disposition: form-data\r\n\r\n\r\n" + END,
        b"--xyz\r\nContent-Disposition: form-data; name=a\r\nContent-Disposition: form-data; name=b\r\n\r\n\r\n" + END,
        b'--xyz\r\nContent-Disposition: form-data; name="' + b"a" * 65 + b'"\r\n\r\n\r\n' + END,
        b"--xyz\r\nContent-Disposition: form-data; name=\xff\r\n\r\n\r\n" + END,
        b"--xyz\r\nContent-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: base64\r\n\r\n\r\n" + END,
        b"--xyz\r\n folded: a\r\n\r\n\r\n" + END,
        b"--xyz\r\nno colon\r\n\r\n\r\n" + END,
        b"--xyz\r\n" + b"a: b\r\n" * 17 + b"\r\n\r\n" + END,
        b"--xyz\r\na: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n\r\n" + END,
        b"--xyz\r\na: " + b"b" * 3 * MAX_HEAD_BYTES,
        b"--xyz" + b" " * 2 * MAX_HEAD_BYTES,
        b"".join(head(f"a{n}") + b"\r\n" for n in range(MAX_PARTS + 1)) + END,
    ],
)
def test_what_is_malformed_is_refused(data: bytes) -> None:
    parser = MultipartParser(BOUNDARY)
    with pytest.raises(InvalidRequest):
        for start in range(0, len(data), 64):
            parser.feed(data[start : start + 64])


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=utf-8; BOUNDARY="a b:c"', b"a b:c"),
        ("multipart/form-data; boundary=" + "a" * 70, b"a" * 70),
    ],
)
def test_the_boundary_is_in_the_content_type(content_type: str, boundary: bytes) -> None:
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/mixed; boundary=a",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary="a "',
        "multipart/form-data; boundary=" + "a" * 71,
        "multipart/form-data; boundary=ä",
    ],
)
def test_without_a_boundary_nothing_is_read(content_type: str) -> None:
    with pytest.raises(InvalidRequest):
        boundary_of(content_type)
