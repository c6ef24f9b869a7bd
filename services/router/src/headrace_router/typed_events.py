"""Server-sent events whose type is told twice: in the event's name and in its data. Pure."""

from typing import Any

import msgspec

from headrace_router import sse

_encode = msgspec.json.Encoder().encode


def typed_event(kind: str, data: Any) -> bytes:
    """`data` is encoded as JSON."""
    return b"event: " + kind.encode() + b"\n" + sse.event(_encode(data))
