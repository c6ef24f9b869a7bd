"""Bodies that would keep the parser busy are refused before; long texts are not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router import json_structure
from headrace_router.json_structure import MAX_CONTAINERS, MAX_ELEMENTS, MAX_STRINGS, SMALL_BYTES, check_structure
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


@given(_VALUES, st.booleans())
def test_what_is_counted_is_what_is_there(value: Any, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode() + b" " * (SMALL_BYTES + 1)
    found = counts(value)
    with pytest.MonkeyPatch.context() as patch:
        for i, name in enumerate(("MAX_CONTAINERS", "MAX_STRINGS", "MAX_ELEMENTS")):
            patch.setattr(json_structure, name, found[i])
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
