"""Server-sent events as bytes, as load tools and SDKs expect them: `data: {json}` and an empty line. Pure.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
BLANK = b"\n\n"
"""Fills silence, so that everybody on the way sees that the connection lives. No comment: load tools that strip each
piece they read would put the next event behind it, and lose the first token."""
PING = b": ping\n"
"""The same in streams whose events have ids: there some parsers take a blank line for an event without data."""
DONE = b"data: [DONE]\n\n"


_LINE_ENDS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")
"""What ends a line for Python's str.splitlines, and so for many clients, but neither for JSON nor for this format."""


def event(data: bytes, event_id: str | None = None) -> bytes:
    """`data` is JSON in one line."""
    if not data.isascii():
        for char, escaped in _LINE_ENDS:
            data = data.replace(char, escaped)
    if event_id is None:
        return b"data: " + data + b"\n\n"
    return b"id: " + event_id.encode() + b"\ndata: " + data + b"\n\n"
