"""Instruments and the registry of a service."""

from headrace_shared import telemetry
from headrace_shared.telemetry import Instrument, Metrics


def test_registries_are_independent() -> None:
    first, second = Metrics(), Metrics()
    first.counter(telemetry.REQUESTS).labels("m", "finished").inc()
    first.counter(telemetry.REQUESTS).labels("m", "finished").inc()
    assert b'headrace_requests_total{model="m",outcome="finished"} 2.0' in first.render()
    assert b"headrace_requests_total{" not in second.render()


def test_all_instruments_can_be_made() -> None:
    metrics = Metrics()
    instruments = [value for value in vars(telemetry).values() if isinstance(value, Instrument)]
    for instrument in instruments:
        made = {"counter": metrics.counter, "gauge": metrics.gauge, "histogram": metrics.histogram}[instrument.kind](
            instrument
        )
        if instrument.labels:
            made.labels(*["x"] * len(instrument.labels))
    text = metrics.render().decode()
    assert len(instruments) > 10
    for instrument in instruments:
        assert f"\n{instrument.name}" in text
