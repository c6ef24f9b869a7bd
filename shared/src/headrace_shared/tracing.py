"""Spans of requests, as every service makes them, without the library that carries them.

`Service.tracing` is None unless the standard OTEL_… variables name a collector; then nothing is imported and no span is
built. With a collector, `otel.py` is behind this. Times are seconds since the epoch.

Two rules keep a trace whole when a process is killed:
- The context that travels is that of the router's `publish` span, in the body of the request (brokers may rename the
  header), so it comes along with every grant, snapshot and second delivery.
- A span that others hang on has ended, and so been exported, before they are. Only the router's own two outer spans
  live as long as the request.

Names and attributes: OpenTelemetry's semantic conventions for HTTP, messaging and generative AI; what they do not know
is called `headrace.…`. No prompt or answer text, and nothing else that a client wrote, is recorded.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from headrace_shared.messages import Request
from headrace_shared.trace_context import TraceContext, parse_trace

Kind = Literal["server", "client", "producer", "consumer", "internal"]
Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]

PROVIDER = "headrace"
"""gen_ai.provider.name: the conventions know no self-hosted value."""
REQUESTS_TEMPLATE = "requests.{model}.{lane}.{partition}"
GRANTS_TEMPLATE = "grants.{worker}"
PROGRESS_TEMPLATE = "progress.{scheduler}"
NO_ATTRIBUTES: Attributes = {}

_OPERATION_TYPES = {"publish": "send", "receive": "receive", "process": "process", "ack": "settle"}


class Span(Protocol):
    @property
    def context(self) -> TraceContext: ...

    @property
    def is_recording(self) -> bool:
        """False for one that sampling left out: its context travels all the same."""
        ...

    def rename(self, name: str) -> None: ...

    def set(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES, at: float | None = None) -> None:
        """`at`: now, if not given."""
        ...

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        """`error`: a code of ours, for what went wrong."""
        ...


class Tracing(Protocol):
    def begin(
        self,
        name: str,
        kind: Kind,
        parent: TraceContext | None,
        *,
        at: float | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
        links: Sequence[TraceContext] = (),
    ) -> Span:
        """`parent` None: a trace of its own."""
        ...

    async def close(self) -> None:
        """Sends what waits, within a bounded time. Never raises."""
        ...


def wall_time(monotonic: float) -> float:
    """Seconds since the epoch of a moment of `time.monotonic`."""
    return time.time() - time.monotonic() + monotonic


def sampled_context(request: Request) -> TraceContext | None:
    """What spans about the request hang on; None if it is not to be traced."""
    context = parse_trace(request.trace)
    return context if context is not None and context.flags & 1 else None


def trace_id_of(request: Request) -> str:
    """For logs; empty if it has none."""
    context = parse_trace(request.trace)
    return context.trace_id if context is not None else ""


def messaging(operation: str, template: str, destination: str, **more: Value) -> dict[str, Value]:
    """Attributes of a span about a message. `operation` is publish, receive, process or ack; `more` is put under
    `messaging.`, with dots for double underscores."""
    return {
        "messaging.system": "nats",
        "messaging.operation.name": operation,
        "messaging.operation.type": _OPERATION_TYPES[operation],
        "messaging.destination.template": template,
        "messaging.destination.name": destination,
        **{f"messaging.{name.replace('__', '.')}": value for name, value in more.items()},
    }
