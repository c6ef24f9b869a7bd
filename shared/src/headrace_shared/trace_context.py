"""Which trace a request belongs to, as it travels in headers and in requests' bodies."""

import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_TRACESTATE = 512


class TraceContext(NamedTuple):
    """W3C Trace Context, level 1. https://www.w3.org/TR/trace-context/"""

    trace_id: str
    """32 hex digits, not all zero."""
    span_id: str
    """16 hex digits, not all zero."""
    flags: int = 1
    """Bit 0: sampled."""
    tracestate: str = ""

    def child(self) -> "TraceContext":
        """The same trace, a new span."""
        return self._replace(span_id=_random_hex(8))

    def to_headers(self) -> dict[str, str]:
        """For HTTP headers, bus headers and `Request.trace`. Lower case: some clients compare names exactly."""
        headers = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"}
        return {**headers, "tracestate": self.tracestate} if self.tracestate else headers


def new_trace() -> TraceContext:
    return TraceContext(_random_hex(16), _random_hex(8))


def parse_trace(headers: Mapping[str, str]) -> TraceContext | None:
    """The context in headers with lower-case names; None if there is none or it is malformed."""
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = headers.get("tracestate", "").strip()
    if len(state) > _MAX_TRACESTATE or not state.isascii() or not state.isprintable():
        state = ""
    return TraceContext(trace_id, span_id, int(flags, 16) & 1, state)


def continue_trace(headers: Mapping[str, str]) -> TraceContext:
    """A child of the caller's span, or a new trace."""
    parent = parse_trace(headers)
    return parent.child() if parent else new_trace()


def _random_hex(num_bytes: int) -> str:
    """Random and not all zero, which the specification forbids."""
    while True:
        value = secrets.token_hex(num_bytes)
        if int(value, 16):
            return value
