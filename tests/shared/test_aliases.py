from prometheus_client.parser import text_string_to_metric_families

from headrace_shared.telemetry import Instrument, Metrics

CALLS = Instrument("counter", "headrace_things_total", "Things.", ("kind", "model"))
TIME = Instrument("histogram", "headrace_time_seconds", "Time.", ("kind", "model"), (1.0, 2.0))
LEVEL = Instrument("gauge", "headrace_level", "Level.", ("model",))
GAP = Instrument("histogram", "headrace_gap_seconds", "Gap.", ("model",), (0.1, 1.0))


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_an_alias_adds_up_what_other_labels_tell_apart() -> None:
    metrics = Metrics()
    metrics.alias("vllm:things_total", CALLS)
    metrics.alias("vllm:time_seconds", TIME)
    metrics.alias("vllm:level", LEVEL)
    for kind, count in (("a", 2), ("b", 3)):
        metrics.counter(CALLS).labels(kind, "m").inc(count)
        metrics.histogram(TIME).labels(kind, "m").observe(count - 0.5)
    metrics.gauge(LEVEL).labels("m").set(0.25)
    seen = samples(metrics)
    labels = {"model_name": "m", "engine": "0"}
    assert seen[key("vllm:things_total", **labels)] == 5
    assert seen[key("vllm:time_seconds_bucket", **labels, le="1.0")] == 0
    assert seen[key("vllm:time_seconds_bucket", **labels, le="2.0")] == 1
    assert seen[key("vllm:time_seconds_bucket", **labels, le="+Inf")] == 2
    assert seen[key("vllm:time_seconds_count", **labels)] == 2 and seen[key("vllm:time_seconds_sum", **labels)] == 4
    assert seen[key("vllm:level", **labels)] == 0.25
    assert seen[key("headrace_things_total", kind="a", model="m")] == 2


def test_an_alias_is_there_before_there_is_anything_to_tell() -> None:
    metrics = Metrics()
    metrics.alias("vllm:things_total", CALLS)
    assert b"# TYPE vllm:things_total counter" in metrics.render()


def test_a_tally_counts_as_a_histogram_does() -> None:
    plain, tallied = Metrics(), Metrics()
    values = (0.05, 0.1, 0.1000001, 0.7, 1.0, 5.0)
    for value in values:
        plain.histogram(GAP).labels("m").observe(value)
        tallied.tally(GAP).labels("m").observe(value)
    expected = {name: value for name, value in samples(plain).items() if not name[0].endswith("_created")}
    assert samples(tallied) == expected
    assert tallied.tally(GAP).labels("m") is tallied.tally(GAP).labels("m")
