"""Server-sent events as bytes, as load tools and SDKs expect them: `data: {json}` and an empty line. Pure.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PING = b": ping\n\n"
"""A comment: clients skip it, proxies see that the connection lives."""
DONE = b"data: [DONE]\n\n"


def event(data: bytes, event_id: str | None = None) -> bytes:
    """`data` is JSON in one line."""
    if event_id is None:
        return b"data: " + data + b"\n\n"
    return b"id: " + event_id.encode() + b"\ndata: " + data + b"\n\n"
