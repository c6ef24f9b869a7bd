"""How much there is in a JSON text, counted before it is parsed. Pure.

A parser makes an object of everything, and nothing else runs meanwhile: sixteen megabytes of `[[],[],…` would stop all
streams for seconds. The count is made piece by piece, and long texts in a body cost little.
"""

from collections.abc import Iterator

from headrace_shared.errors import InvalidRequest

SMALL_BYTES = 64 * 1024
"""Whatever is in so little is soon parsed."""
MAX_CONTAINERS = 20_000
MAX_STRINGS = 100_000
MAX_ELEMENTS = 400_000
"""Of lists and objects together. OpenAI takes 300,000 tokens of embeddings' inputs in one call."""

PIECE_BYTES = 256 * 1024
"""Looked at in one go, while no other thread runs."""

_NO_NUMBERS = (b"NaN", b"Infinity")
_MAX_CUT = len(b"Infinity") - 1
_STRUCTURE = b'",[{'
_OTHERS = bytes(byte for byte in range(256) if byte not in _STRUCTURE)


class Structure:
    """Of the JSON texts of one call, together: many small ones are as much as a large one."""

    def __init__(self) -> None:
        self._num_bytes = self._num_quotes = self._num_containers = self._num_commas = 0

    def add(self, text: bytes) -> None:
        """Raises InvalidRequest if it is too much. Of what is no JSON anything may be said."""
        self._num_bytes += len(text)
        if self._num_bytes <= SMALL_BYTES:
            return
        for piece, starts_inside in _pieces(text):
            bare = piece.translate(None, _OTHERS)
            self._num_quotes += bare.count(b'"')
            if self._num_quotes > 2 * MAX_STRINGS:
                raise _too_much(f"{MAX_STRINGS} strings")
            outside = b"".join(bare.split(b'"')[starts_inside::2])
            self._num_containers += outside.count(b"[") + outside.count(b"{")
            if self._num_containers > MAX_CONTAINERS:
                raise _too_much(f"{MAX_CONTAINERS} lists and objects")
            self._num_commas += outside.count(b",")
            if self._num_commas > MAX_ELEMENTS:
                raise _too_much(f"{MAX_ELEMENTS} elements")


def check_structure(body: bytes) -> None:
    """Of a whole body. Raises InvalidRequest."""
    Structure().add(body)


def check_numbers(body: bytes) -> None:
    """Many parsers take NaN and Infinity for numbers, but they are none of JSON (RFC 8259). Raises InvalidRequest."""
    parts = (body[start : start + PIECE_BYTES + _MAX_CUT] for start in range(0, len(body), PIECE_BYTES))
    if not any(name in part for part in parts for name in _NO_NUMBERS):
        return
    before = b""
    for piece, starts_inside in _pieces(body):
        words = piece.split(b'"')
        if not starts_inside:
            words[0] = before + words[0]  # a name may have been cut
        ends_inside = (len(words) + starts_inside) % 2 == 0
        if any(name in outside for outside in words[starts_inside::2] for name in _NO_NUMBERS):
            raise InvalidRequest(
                "The body is no valid JSON: NaN and Infinity are no numbers of it.", code="invalid_json"
            )
        before = b"" if ends_inside else words[-1][-_MAX_CUT:]


def _pieces(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """(piece, whether it begins inside of a string); every quote in a piece begins or ends a string. In pieces, because
    no other thread runs while one is looked at."""
    is_inside = False
    start = 0
    while start < len(body):
        piece = body[start : start + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[start : start + PIECE_BYTES + 1]  # with what the last backslash escapes
        start += len(piece)
        bare = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece
        yield bare, is_inside
        is_inside ^= bool(bare.count(b'"') % 2)


def _too_much(what: str) -> InvalidRequest:
    return InvalidRequest(f"The body holds more than {what}.", code="payload_too_large")
