"""When sequences on a worker began and ended, and what is told of it."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace_shared.messages import Admission, BlockId, FinishReason, SequenceId, WorkerId
from headrace_shared.otel import OtelTracing
from headrace_shared.telemetry import Metrics
from headrace_shared.trace_context import TraceContext
from headrace_worker.engine_frames import Iteration
from headrace_worker.iteration import SequenceResult
from headrace_worker.stay_metrics import DECODE_TIME, ENGINE_SECONDS, PREFILL_TIME, StayMetrics
from headrace_worker.stay_traces import StayTraces
from headrace_worker.stay_watch import StayWatch
from tests.shared.samples import REQUEST

PARENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


class Bench:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.exporter = InMemorySpanExporter()
        self.tracing = OtelTracing("worker", "worker-1", Metrics(), self.exporter)
        traces = StayTraces(self.tracing, WorkerId("worker-1"))
        self.watch = StayWatch(StayMetrics(self.metrics, "m"), traces, lambda _: 3)
        self.number = 0

    def admit(self, sequence_id: int, now: float, *, is_traced: bool = True) -> None:
        request = replace(REQUEST, trace=PARENT.to_headers() if is_traced else {})
        admission = Admission(
            sequence_id=SequenceId(sequence_id), request=request, choice=0, attempt=0, block_ids=(BlockId(0),)
        )
        self.watch.admitted([admission], now)

    def iterate(
        self, now: float, rows: Sequence[SequenceResult] = (), prefill: int = 0, released: Sequence[int] = ()
    ) -> None:
        self.number += 1
        frame = Iteration(
            generation=0,
            num_iterations=self.number,
            rows=tuple(rows),
            released=tuple(SequenceId(number) for number in released),
            num_prefill_tokens=prefill,
            elapsed_s=0.1,
        )
        self.watch.on_iteration(frame, now)

    async def spans(self) -> dict[str, Any]:
        await self.tracing.close()
        return {span.name: span for span in self.exporter.get_finished_spans() if span.name != "iteration"}

    def value(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, {"model": "m", **labels})
        assert value is not None, name
        return value


@pytest.fixture
def bench() -> Bench:
    return Bench()


def row(sequence_id: int, token: int | None = None, finish: FinishReason | None = None) -> SequenceResult:
    return SequenceResult(SequenceId(sequence_id), 1, token, finish)


def seconds(span: Any) -> float:
    return float((span.end_time - span.start_time) / 1e9)


async def test_a_stay_is_measured_from_what_the_engine_reports(bench: Bench) -> None:
    bench.admit(1, 10.0)
    bench.iterate(10.5, [row(1)], prefill=8)  # began at 10.4
    bench.iterate(10.6, [row(1, token=5)], prefill=4)
    bench.iterate(10.7, [row(1, token=6)])
    bench.iterate(10.8, [row(1, token=7, finish=FinishReason.LENGTH)], released=[1])
    spans = await bench.spans()
    assert set(spans) == {"process grants.{worker}", "prefill", "decode"}
    stay = spans["process grants.{worker}"]
    assert f"{stay.context.trace_id:032x}" == PARENT.trace_id and f"{stay.parent.span_id:016x}" == PARENT.span_id
    assert seconds(stay) == pytest.approx(0.8, abs=0.01)
    assert seconds(spans["prefill"]) == pytest.approx(0.2, abs=0.01)
    assert seconds(spans["decode"]) == pytest.approx(0.2, abs=0.01)
    assert spans["prefill"].parent.span_id == spans["decode"].parent.span_id == stay.context.span_id
    assert stay.attributes["headrace.ending"] == "length"
    assert stay.attributes["gen_ai.usage.output_tokens"] == 3
    assert bench.value(f"{PREFILL_TIME.name}_sum") == pytest.approx(0.2)
    assert bench.value(f"{DECODE_TIME.name}_sum") == pytest.approx(0.2)


async def test_time_is_shared_out_between_prefill_and_decode(bench: Bench) -> None:
    bench.admit(1, 10.0)
    bench.iterate(10.1, [row(1, token=5)], prefill=6)
    bench.admit(2, 10.1)
    bench.iterate(10.2, [row(1, token=6), row(2)], prefill=3)  # one decodes, three of a prompt
    bench.iterate(10.3, [row(1, token=7), row(2, token=8)], prefill=1)
    assert bench.value(ENGINE_SECONDS.name, phase="prefill") == pytest.approx(0.1 + 0.075 + 0.05)
    assert bench.value(ENGINE_SECONDS.name, phase="decode") == pytest.approx(0.025 + 0.05)
    assert bench.value("headrace_iteration_prefill_share_count") == 3
    assert bench.value("headrace_iteration_sequences_sum") == 5


async def test_a_stopped_stay_is_shown_but_not_measured(bench: Bench) -> None:
    bench.admit(1, 10.0)
    bench.admit(2, 10.0, is_traced=False)
    bench.iterate(10.5, [row(1, token=5), row(2, token=5)], prefill=8)
    bench.iterate(10.6, released=[1, 2])
    spans = await bench.spans()
    assert spans["process grants.{worker}"].attributes["headrace.ending"] == "stopped"
    assert len(spans) == 3
    assert bench.value(f"{PREFILL_TIME.name}_count") == 0


async def test_what_was_dropped_leaves_nothing(bench: Bench) -> None:
    bench.admit(1, 10.0)
    bench.iterate(10.5, [row(1, token=5)], prefill=8)
    bench.watch.clear()
    bench.iterate(10.6, [row(1, token=6, finish=FinishReason.STOP)], released=[1])
    assert await bench.spans() == {}


async def test_iterations_are_shown_once_a_second_with_links(bench: Bench) -> None:
    bench.admit(1, 10.0)
    bench.admit(2, 10.0, is_traced=False)
    for step in range(25):
        bench.iterate(10.0 + step / 10, [row(1, token=5), row(2, token=5)])
    await bench.tracing.close()
    shown = [span for span in bench.exporter.get_finished_spans() if span.name == "iteration"]
    assert len(shown) == 3 and all(span.parent is None for span in shown)
    assert [f"{link.context.trace_id:032x}" for link in shown[0].links] == [PARENT.trace_id]
    assert (shown[0].attributes or {})["headrace.iteration.sequences"] == 2
