"""A collector for tests: takes OTLP over HTTP, and answers questions about the spans."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from tests.http_double import SilentHandler, served

KINDS = {
    ProtoSpan.SPAN_KIND_INTERNAL: "internal",
    ProtoSpan.SPAN_KIND_SERVER: "server",
    ProtoSpan.SPAN_KIND_CLIENT: "client",
    ProtoSpan.SPAN_KIND_PRODUCER: "producer",
    ProtoSpan.SPAN_KIND_CONSUMER: "consumer",
}


class ReceivedSpan(NamedTuple):
    service: str
    """service.name"""
    instance: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for a root."""
    start: float
    end: float
    """Seconds since the epoch."""
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]
    links: tuple[str, ...]
    """Trace ids."""
    is_error: bool


class OtlpReceiver:
    """Use `running`."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.raw: list[bytes] = []
        """Bodies, as they came."""
        self.headers: list[dict[str, str]] = []
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> "Iterator[OtlpReceiver]":
        with served(_Handler) as server:
            receiver = cls(server.server_port)
            server.receiver = receiver  # type: ignore[attr-defined]  # what the handler knows of is its server
            yield receiver

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        spans = []
        for resource in request.resource_spans:
            about = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                spans += [_received(span, about) for span in scope.spans]
        with self._lock:
            self.raw.append(body)
            self.headers.append(headers)
            self._spans += spans

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait(self, condition: Callable[[list[ReceivedSpan]], object], timeout_s: float = 60.0) -> list[ReceivedSpan]:
        """Until the spans meet the condition; blocks. Returns them."""
        deadline = time.monotonic() + timeout_s
        while not condition(spans := self.spans):
            assert time.monotonic() < deadline, f"not in time: {sorted({span.name for span in spans})}"
            time.sleep(0.05)
        return spans


class _Handler(SilentHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.receiver.take(body, dict(self.headers.items()))  # type: ignore[attr-defined]  # set by `running`
        reply = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


def assert_connected(spans: list[ReceivedSpan], root_parent: str = "") -> None:
    """One tree: every span hangs on another of these, but for one that hangs on `root_parent`."""
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans), "a span came twice"
    roots = [span for span in spans if span.parent_id not in ids]
    assert [span.parent_id for span in roots] == [root_parent], [(span.name, span.service) for span in roots]
    assert len({span.trace_id for span in spans}) == 1


def _received(span: ProtoSpan, about: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        service=str(about.get("service.name", "")),
        instance=str(about.get("service.instance.id", "")),
        name=span.name,
        kind=KINDS[span.kind],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        events={event.name: _attributes(event.attributes) for event in span.events},
        links=tuple(link.trace_id.hex() for link in span.links),
        is_error=span.status.code == 2,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind is not None else None
