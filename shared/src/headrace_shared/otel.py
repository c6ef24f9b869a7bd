"""Spans through OpenTelemetry's SDK to a collector. The only module that imports it, and imported only when needed.

Configured by the standard variables: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
A collector that is away costs a bounded queue and one line in the log.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.span import TraceState

from headrace_shared.telemetry import Instrument, Metrics
from headrace_shared.trace_context import TraceContext
from headrace_shared.tracing import NO_ATTRIBUTES, Attributes, Kind, Span

CLOSE_S = 1.0
"""Longest time that the end of a process waits for spans to be sent."""
DELAY_MS = 1000.0
"""Between two exports, unless OTEL_BSP_SCHEDULE_DELAY says otherwise: what a kill may cost."""

SPANS = Instrument("counter", "headrace_spans_exported_total", "Spans handed to the collector.", ("result",))

log = structlog.get_logger(__name__)

_KINDS = {
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
    "producer": trace.SpanKind.PRODUCER,
    "consumer": trace.SpanKind.CONSUMER,
    "internal": trace.SpanKind.INTERNAL,
}


class _OtelSpan:
    __slots__ = ("_span", "context")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        own = span.get_span_context()
        self.context = TraceContext(
            trace.format_trace_id(own.trace_id),
            trace.format_span_id(own.span_id),
            int(own.trace_flags) & 1,
            own.trace_state.to_header(),
        )

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES, at: float | None = None) -> None:
        self._span.add_event(name, attributes, _nanoseconds(at))

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end(_nanoseconds(at))


class _Delivery(SpanExporter):
    """Tells once that the collector cannot be reached, and once that it can again."""

    def __init__(self, exporter: SpanExporter, collector: str, metrics: Metrics) -> None:
        self._exporter = exporter
        self._collector = collector
        self._is_well = True
        self._spans = metrics.counter(SPANS)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_well = result is SpanExportResult.SUCCESS
        self._spans.labels("ok" if is_well else "failed").inc(len(spans))
        if is_well and not self._is_well:
            log.info("traces reach the collector again", collector=self._collector)
        elif self._is_well and not is_well:
            log.warning("traces do not reach the collector; they are dropped", collector=self._collector)
        self._is_well = is_well
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class OtelTracing:
    """Implements `Tracing`. The sampler is that of OTEL_TRACES_SAMPLER, by default all, or what the caller decided."""

    def __init__(
        self,
        service: str,
        service_id: str,
        metrics: Metrics,
        exporter: SpanExporter | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`exporter`: for tests; else one to the collector that the variables name."""
        created = Resource.create()
        resource = Resource({"service.namespace": "headrace"}).merge(created)
        if "service.instance.id" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):  # else it is random
            resource = resource.merge(Resource({"service.instance.id": service_id}))
        if str(created.attributes.get("service.name", "")).startswith("unknown_service"):  # nobody named it
            resource = resource.merge(Resource({"service.name": f"headrace-{service}"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        delay_ms = None if environ.get("OTEL_BSP_SCHEDULE_DELAY") else DELAY_MS
        wanted = exporter or OTLPSpanExporter()
        self._provider.add_span_processor(
            BatchSpanProcessor(_Delivery(wanted, _collector(environ), metrics), schedule_delay_millis=delay_ms)
        )
        self._tracer = self._provider.get_tracer("headrace")
        # From here on its complaints are one line for each batch; ours is one for all.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

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
        # An explicit context: whatever is current belongs to somebody else's request.
        context = Context() if parent is None else trace.set_span_in_context(_remote(parent), Context())
        span = self._tracer.start_span(
            name,
            context,
            _KINDS[kind],
            attributes,
            [trace.Link(_span_context(link)) for link in links],
            _nanoseconds(at),
        )
        return _OtelSpan(span)

    async def close(self) -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the event loop has not waited, and is closed
                loop.call_soon_threadsafe(done.set)

        # A thread of our own: the event loop's would be waited for.
        threading.Thread(target=shut_down, name="traces-close", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await done.wait()
        except TimeoutError:
            log.info("traces not sent in time")


def _remote(context: TraceContext) -> trace.Span:
    return trace.NonRecordingSpan(_span_context(context))


def _span_context(context: TraceContext) -> trace.SpanContext:
    return trace.SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(context.flags & 1),
        trace_state=TraceState.from_header([context.tracestate]) if context.tracestate else None,
    )


def _nanoseconds(at: float | None) -> int | None:
    return None if at is None else int(at * 1e9)


def _collector(environ: Mapping[str, str]) -> str:
    """Host and port only: the address may hold credentials."""
    url = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or ""
    return urlsplit(url).netloc.rpartition("@")[2]
