"""Whatever a client calls its file, the name is harmless where it is shown."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router.files.filename import FALLBACK, MAX_BYTES, MAX_CHARS, content_disposition, safe_filename


@pytest.mark.parametrize(
    ("given_name", "safe"),
    [
        ("input.jsonl", "input.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\temp\\a b.jsonl", "a b.jsonl"),
        (".hidden", "hidden"),
        ("..", FALLBACK),
        ("", FALLBACK),
        ("a/", FALLBACK),
        ("a\x00\r\nb\x1b[2J", "ab[2J"),
        ("exe\u202elnosj.", "exelnosj"),
        ("日本\u3000語.jsonl", "日本 語.jsonl"),
        ("x" * 1000, "x" * MAX_CHARS),
    ],
)
def test_names(given_name: str, safe: str) -> None:
    assert safe_filename(given_name) == safe


@given(st.text(max_size=400))
def test_every_name_is_short_and_visible(name: str) -> None:
    safe = safe_filename(name)
    assert safe and len(safe) <= MAX_CHARS and len(safe.encode()) <= MAX_BYTES and safe_filename(safe) == safe
    assert not any(char in "/\\" or unicodedata.category(char).startswith("C") for char in safe)
    header = content_disposition(safe)
    assert header.isascii() and header.isprintable() and header.count('"') == 2
