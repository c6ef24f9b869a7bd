"""What is traced, how it reaches a collector, and that a bad collector costs nothing."""

import asyncio
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace_shared.logs import configure_logging
from headrace_shared.otel import CLOSE_S, OtelTracing
from headrace_shared.telemetry import Metrics
from headrace_shared.trace_context import TraceContext
from headrace_shared.tracing import messaging, sampled_context, trace_id_of
from headrace_shared.tracing_setup import set_up_tracing, wants_tracing
from tests.shared.samples import REQUEST

PARENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1, "vendor=1")


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> OtelTracing:
    return OtelTracing("router", "router-1", Metrics(), exporter)


def exported(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize(
    ("environ", "wants"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_standard_variables_switch_it_on(environ: Mapping[str, str], wants: bool) -> None:
    assert wants_tracing(environ) is wants


def test_another_protocol_is_said_and_not_used(logs: io.StringIO) -> None:
    configure_logging("router", "router-1", "info", "json", logs)
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert set_up_tracing("router", "router-1", Metrics(), environ) is None
    assert "http/protobuf" in json.loads(logs.getvalue())["event"]


def test_nothing_is_imported_without_a_collector() -> None:
    services = ("router", "scheduler", "worker", "autoscaler")
    program = "import sys, " + ", ".join(f"headrace_{name}.service" for name in services)
    # FastAPI imports the library's interface by itself; that is all there may be.
    program += (
        "; sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


async def test_spans_hang_on_what_they_are_given(exporter: InMemorySpanExporter, tracing: OtelTracing) -> None:
    outer = tracing.begin("outer", "server", PARENT, at=100.0, attributes={"a": 1})
    inner = tracing.begin("inner", "internal", outer.context, at=101.0, links=[PARENT])
    inner.event("half", {"b": "c"}, at=101.5)
    inner.end(at=102.0, error="timeout")
    outer.rename("renamed")
    outer.set({"d": 2.5})
    outer.end(at=103.0)
    await tracing.close()
    spans = exported(exporter)
    first, second = spans["renamed"], spans["inner"]
    assert first.parent is not None and second.parent is not None and first.context is not None
    assert f"{first.parent.span_id:016x}" == PARENT.span_id and first.parent.is_remote
    assert second.parent.span_id == first.context.span_id
    assert outer.context.trace_id == inner.context.trace_id == PARENT.trace_id
    assert inner.context.tracestate == "vendor=1"
    assert (first.start_time, first.end_time) == (100_000_000_000, 103_000_000_000)
    assert dict(first.attributes or {}) == {"a": 1, "d": 2.5} and first.status.is_unset
    assert (second.attributes or {})["error.type"] == "timeout" and not second.status.is_ok
    assert [event.name for event in second.events] == ["half"] and second.events[0].timestamp == 101_500_000_000
    assert f"{second.links[0].context.trace_id:032x}" == PARENT.trace_id
    assert first.resource.attributes["service.name"] == "headrace-router"
    assert first.resource.attributes["service.instance.id"] == "router-1"


async def test_what_the_caller_does_not_sample_is_not_recorded(
    exporter: InMemorySpanExporter, tracing: OtelTracing
) -> None:
    span = tracing.begin("unsampled", "server", PARENT._replace(flags=0))
    assert not span.is_recording and span.context.trace_id == PARENT.trace_id and span.context.flags == 0
    span.end()
    await tracing.close()
    assert exporter.get_finished_spans() == ()


async def test_the_sampler_comes_from_the_environment(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    tracing = OtelTracing("router", "router-1", Metrics(), exporter)
    assert not tracing.begin("root", "server", None).is_recording
    tracing.begin("child", "server", PARENT).end()
    await tracing.close()
    resource = exported(exporter)["child"].resource.attributes
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("front", "test")


class Unreachable(SpanExporter):
    def __init__(self) -> None:
        self.is_well = False
        self.num_calls = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_calls += 1
        return SpanExportResult.SUCCESS if self.is_well else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


async def test_a_collector_that_is_away_is_one_line(logs: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("router", "router-1", "info", "json", logs)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret@collector.example:4318/base")
    exporter, metrics = Unreachable(), Metrics()
    tracing = OtelTracing("router", "router-1", metrics, exporter)
    for wanted in (3, 5):
        while exporter.num_calls < wanted:
            tracing.begin("lost", "internal", None).end()
            await asyncio.sleep(0.02)
        exporter.is_well = True
    await tracing.close()
    lines = [json.loads(line) for line in logs.getvalue().splitlines()]
    assert [line["level"] for line in lines] == ["warning", "info"], lines
    assert lines[0]["collector"] == "collector.example:4318" and "secret" not in logs.getvalue()
    assert b'headrace_spans_exported_total{result="failed"}' in metrics.render()


class Stuck(SpanExporter):
    """A collector that takes the bytes and never answers."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.release.wait(60)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    exporter = Stuck()
    yield exporter
    exporter.release.set()


async def test_a_stuck_collector_holds_up_nothing(stuck: Stuck) -> None:
    tracing = OtelTracing("router", "router-1", Metrics(), stuck)
    for _ in range(5000):  # more than the queue holds
        tracing.begin("kept", "internal", None).end()
    began_at = time.monotonic()
    await tracing.close()
    assert time.monotonic() - began_at < CLOSE_S + 20.0


def test_requests_carry_their_context_in_the_body() -> None:
    request = replace(REQUEST, trace=PARENT.to_headers())
    assert sampled_context(request) == PARENT and trace_id_of(request) == PARENT.trace_id
    assert sampled_context(replace(REQUEST, trace=PARENT._replace(flags=0).to_headers())) is None
    assert sampled_context(replace(REQUEST, trace={})) is None and trace_id_of(replace(REQUEST, trace={})) == ""


def test_messaging_attributes_follow_the_conventions() -> None:
    assert messaging("receive", "a.{b}", "a.c", message__id="7") == {
        "messaging.system": "nats",
        "messaging.operation.name": "receive",
        "messaging.operation.type": "receive",
        "messaging.destination.template": "a.{b}",
        "messaging.destination.name": "a.c",
        "messaging.message.id": "7",
    }
