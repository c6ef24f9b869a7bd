"""Bodies that would keep the parser busy are refused before; long texts are not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router import json_structure
from headrace_router.json_structure import (
    MAX_CONTAINERS,
    MAX_ELEMENTS,
    MAX_STRINGS,
    SMALL_BYTES,
    Structure,
    check_numbers,
    check_structure,
)
from headrace_shared.errors import InvalidRequest

_TEXT = st.text(st.sampled_from(['"', "\\", "[", "{", ",", "]", "a", "\n", "é", "\U0001f600"]), max_size=6)
_VALUES = st.recursive(
    st.one_of(st.integers(-9, 9), st.booleans(), st.none(), _TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXT, inner, max_size=4)),
    max_leaves=12,
)


def counts(value: Any) -> tuple[int, int, int]:
    """Containers, strings, commas between elements."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counts(item) for item in (value.values() if isinstance(value, dict) else value)]
    containers, strings, commas = (sum(each[i] for each in inner) for i in range(3))
    return containers + 1, strings + len(value) * isinstance(value, dict), commas + max(0, len(value) - 1)


@given(_VALUES, st.booleans(), st.integers(2, 9))
def test_what_is_counted_is_what_is_there_wherever_pieces_are_cut(
    value: Any, is_ascii: bool, num_piece_bytes: int
) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    found = counts(value)
    with pytest.MonkeyPatch.context() as patch:
        for i, name in enumerate(("MAX_CONTAINERS", "MAX_STRINGS", "MAX_ELEMENTS")):
            patch.setattr(json_structure, name, found[i])
        patch.setattr(json_structure, "PIECE_BYTES", num_piece_bytes)
        patch.setattr(json_structure, "SMALL_BYTES", 0)
        check_structure(body)
        for i, name in enumerate(("MAX_CONTAINERS", "MAX_STRINGS", "MAX_ELEMENTS")):
            if found[i]:
                patch.setattr(json_structure, name, found[i] - 1)
                with pytest.raises(InvalidRequest):
                    check_structure(body)
                patch.setattr(json_structure, name, found[i])


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * (MAX_CONTAINERS + 1) + b"1]" + b" " * SMALL_BYTES,
        b"[" + b"{}," * (MAX_CONTAINERS + 1) + b"1]" + b" " * SMALL_BYTES,
        b"[" + b'"",' * (MAX_STRINGS + 1) + b"1]",
        b"[" + b"1," * (MAX_ELEMENTS + 1) + b"1]",
        b"[" * 100_000,
    ],
)
def test_too_much_structure_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_structure(body)
    assert caught.value.code == "payload_too_large"


@pytest.mark.parametrize(("piece", "most"), [("[]", MAX_CONTAINERS), ('""', MAX_STRINGS), ("1", MAX_ELEMENTS)])
def test_many_small_texts_are_as_much_as_a_large_one(piece: str, most: int) -> None:
    structure = Structure()
    number = SMALL_BYTES // (len(piece) + 1) - 1
    text = ("[" + ",".join([piece] * number) + "]").encode()
    num_added = 0
    with pytest.raises(InvalidRequest):
        while True:
            structure.add(text)
            num_added += 1
    # The first are too small to be counted.
    assert most // number <= num_added <= most // number + 2


@pytest.mark.parametrize("text", ["a, [{ b" * 200_000, '"' * 500_000, "\\" * 500_000, '\\"' * 200_000, "é" * 500_000])
def test_long_texts_are_no_structure(text: str) -> None:
    check_structure(json.dumps({"model": "m", "prompt": text}).encode())
    check_structure(json.dumps({"model": "m", "prompt": text}, ensure_ascii=False).encode())


@given(st.binary(max_size=200))
def test_what_is_no_json_is_survived(noise: bytes) -> None:
    try:
        check_structure(noise * (SMALL_BYTES // max(1, len(noise)) + 2))
    except InvalidRequest as error:
        assert error.code == "payload_too_large"


@pytest.mark.parametrize("num_piece_bytes", [1, 2, 3, 5, 1 << 18])
@pytest.mark.parametrize(
    "body", [b'{"a": NaN}', b'{"a": [-Infinity, 1]}', b'{"say \\"NaN\\"": Infinity}', b'{"a\\\\": NaN}', b"NaN"]
)
def test_what_is_no_number_of_json_is_refused_wherever_it_stands(
    body: bytes, num_piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_structure, "PIECE_BYTES", num_piece_bytes)
    with pytest.raises(InvalidRequest) as caught:
        check_numbers(body)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("num_piece_bytes", [1, 2, 3, 5, 1 << 18])
@pytest.mark.parametrize("text", ["NaN", "to Infinity and beyond", 'say "NaN"', "\\NaN\\", '\\"Infinity'])
def test_texts_may_speak_of_them(text: str, num_piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_structure, "PIECE_BYTES", num_piece_bytes)
    check_numbers(json.dumps({"content": text, text: 1}).encode())
