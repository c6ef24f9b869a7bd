"""Token ids in bodies, hundreds of thousands of them perhaps, read piece by piece. Pure.

A parser of JSON reads a body in one go, and no other thread runs meanwhile: with so many numbers for too long.
"""

import re
from typing import Any

import msgspec
from msgspec import Raw

from headrace_shared.errors import InvalidRequest

PIECE_BYTES = 32 * 1024
_LIST = re.compile(rb"\[[ \t\r\n]*[-0-9\[]")

Numbers = list[int] | list[list[int]]


def without_numbers(body: bytes, field: str) -> tuple[bytes, Numbers | None]:
    """The body with an empty list in `field`, and what was there, if it was a list of numbers or of such lists; else
    the body as it is, also one that is no JSON. Raises InvalidRequest if something else is among the numbers."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body, None
    text = bytes(fields.get(field, b""))
    if not _LIST.match(text):
        return body, None
    rest: dict[str, Any] = {**fields, field: ()}
    return msgspec.json.encode(rest), _numbers_in(field, text)


def _numbers_in(field: str, text: bytes) -> Numbers:
    try:
        if b"[" not in text[1:]:
            return _numbers(text)
        return [_numbers(bytes(inner)) for inner in msgspec.json.decode(text, type=list[Raw])]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        message = f"Invalid '{field}': token ids are whole numbers, in a list or in lists."
        raise InvalidRequest(message, param=field, code="invalid_type") from None


def _numbers(text: bytes) -> list[int]:
    """Raises MsgspecError."""
    numbers: list[int] = []
    start = 0
    while (comma := text.find(b",", start + PIECE_BYTES)) >= 0:
        numbers += msgspec.json.decode((b"[" if start else b"") + text[start:comma] + b"]", type=list[int])
        start = comma + 1
    return numbers + msgspec.json.decode((b"[" if start else b"") + text[start:], type=list[int])
