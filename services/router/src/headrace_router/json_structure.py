"""How much there is in a JSON text, counted before it is parsed. Pure.

A parser makes an object of everything, and nothing else runs meanwhile: sixteen megabytes of `[[],[],…` would stop all
streams for seconds. The count needs a few milliseconds, and long texts in a body cost nothing.
"""

from headrace_shared.errors import InvalidRequest

SMALL_BYTES = 64 * 1024
"""Whatever is in so little is soon parsed."""
MAX_CONTAINERS = 20_000
MAX_STRINGS = 100_000
MAX_ELEMENTS = 1_500_000
"""Of lists and objects together: the ids of two thousand inputs of 700 tokens, say."""

_STRUCTURE = b'",[{'
_OTHERS = bytes(byte for byte in range(256) if byte not in _STRUCTURE)


def check_structure(body: bytes) -> None:
    """Raises InvalidRequest. Of what is no JSON anything may be said."""
    if len(body) <= SMALL_BYTES:
        return
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    bare = body.translate(None, _OTHERS)
    if bare.count(b'"') > 2 * MAX_STRINGS:
        raise _too_much(f"{MAX_STRINGS} strings")
    outside = b"".join(bare.split(b'"')[::2])
    if outside.count(b"[") + outside.count(b"{") > MAX_CONTAINERS:
        raise _too_much(f"{MAX_CONTAINERS} lists and objects")
    if outside.count(b",") > MAX_ELEMENTS:
        raise _too_much(f"{MAX_ELEMENTS} elements")


def _too_much(what: str) -> InvalidRequest:
    return InvalidRequest(f"The body holds more than {what}.", code="payload_too_large")
