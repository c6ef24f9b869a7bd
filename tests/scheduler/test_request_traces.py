"""Spans of the shell's view of a request, without the shell."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace_scheduler.decisions import Adoption, EndedRequest
from headrace_scheduler.request_traces import RequestTraces
from headrace_shared.bus import Delivery
from headrace_shared.messages import (
    Admission,
    BlockId,
    Outcome,
    Request,
    RequestEnded,
    SchedulerId,
    SequenceId,
    SequenceSnapshot,
    WorkerId,
)
from headrace_shared.otel import OtelTracing
from headrace_shared.telemetry import Metrics
from headrace_shared.trace_context import TraceContext
from tests.shared.samples import REQUEST

PARENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
TRACED = replace(REQUEST, trace=PARENT.to_headers())


class Bench:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = OtelTracing("scheduler", "scheduler-1", Metrics(), self.exporter)
        self.traces = RequestTraces(self.tracing, SchedulerId("scheduler-1"), lambda: 100.0)

    def take(self, request: Request = TRACED, num_delivered: int = 1) -> None:
        delivery = Delivery("requests.m.interactive.0", b"", "ack", 7, num_delivered, 50.0)
        self.traces.taken(request, delivery, 99.0)

    def place(self, worker: str, attempt: int, num_preemptions: int = 0) -> None:
        self.traces.placed(WorkerId(worker), admission(attempt), 0.5, num_preemptions)

    def end(self, outcome: Outcome = Outcome.FINISHED, *, is_settled: bool = True) -> None:
        event = RequestEnded(request_id=TRACED.request_id, outcome=outcome, code="")
        self.traces.settled(EndedRequest(event, TRACED.router, "ack", 7), 0.1, is_settled)

    async def spans(self) -> Sequence[Any]:
        await self.tracing.close()
        return self.exporter.get_finished_spans()


def admission(attempt: int) -> Admission:
    return Admission(
        sequence_id=SequenceId(1), request=TRACED, choice=0, attempt=attempt, block_ids=(BlockId(0),), num_cached=0
    )


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_why_a_request_is_placed_again_is_in_the_name(bench: Bench) -> None:
    bench.take()
    bench.place("worker-1", 0)
    bench.place("worker-1", 1, num_preemptions=1)
    bench.place("worker-2", 2, num_preemptions=1)
    bench.end()
    spans = await bench.spans()
    names = [span.name for span in spans if span.name in ("place", "preemption", "migration")]
    assert names == ["place", "preemption", "migration"]
    migration = next(span for span in spans if span.name == "migration")
    assert migration.attributes["headrace.worker.previous_id"] == "worker-1"
    assert (migration.end_time - migration.start_time) / 1e9 == pytest.approx(0.5, abs=0.01)


async def test_a_parent_is_sent_before_what_hangs_on_it(bench: Bench) -> None:
    bench.take()
    bench.place("worker-1", 0)
    bench.end()
    seen = {PARENT.span_id}
    for span in await bench.spans():
        assert f"{span.parent.span_id:016x}" in seen, span.name
        seen.add(f"{span.context.span_id:016x}")


async def test_a_second_delivery_is_a_sibling_in_the_same_trace(bench: Bench) -> None:
    bench.take()
    bench.take(num_delivered=2)
    processes = [span for span in await bench.spans() if span.name.startswith("process ")]
    assert [span.attributes["headrace.delivery_count"] for span in processes] == [1, 2]
    assert {f"{span.parent.span_id:016x}" for span in processes} == {PARENT.span_id}
    assert {f"{span.context.trace_id:032x}" for span in processes} == {PARENT.trace_id}


async def test_what_was_adopted_migrates_from_the_worker_it_came_with(bench: Bench) -> None:
    entry = SequenceSnapshot(admission=admission(0), tokens=b"", num_computed=0)
    bench.traces.adopted(WorkerId("worker-1"), Adoption((TRACED.request_id,), ()), [entry])
    bench.traces.adopted(WorkerId("worker-1"), Adoption((), ()), [entry])
    bench.place("worker-2", 1)
    assert [span.name for span in await bench.spans()] == ["process progress.{scheduler}", "migration"]


async def test_what_is_not_sampled_leaves_no_trace(bench: Bench) -> None:
    bench.take(replace(REQUEST, trace=PARENT._replace(flags=0).to_headers()))
    bench.place("worker-1", 0)
    bench.end()
    assert await bench.spans() == ()


async def test_failures_are_errors_and_what_is_let_go_is_forgotten(bench: Bench) -> None:
    bench.take()
    bench.end(Outcome.FAILED)
    bench.take()
    bench.end(is_settled=False)
    bench.take()
    bench.traces.prune(set())
    bench.end()
    ends = [span for span in await bench.spans() if span.name.startswith("ack ")]
    assert [span.attributes["error.type"] for span in ends] == ["failed", "not_settled"]
