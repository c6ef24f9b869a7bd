import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from headrace_shared import telemetry
from headrace_shared.telemetry import (
    Instrument,
    Metrics,
    TraceContext,
    configure_logging,
    continue_trace,
    new_trace,
    parse_trace,
)

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    stream = io.StringIO()
    yield stream
    logging.raiseExceptions = raises
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_a_log_that_cannot_be_written_is_no_reason_for_tracebacks(
    monkeypatch: pytest.MonkeyPatch, logs: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(_: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logs, "write", write)
    configure_logging("router", "router-1", "info", "json", logs)
    structlog.get_logger().info("served")
    assert capsys.readouterr().err == ""


def test_logs_are_json_with_the_process_and_what_is_bound(logs: io.StringIO) -> None:
    configure_logging("router", "router-1", "info", "json", logs)
    with structlog.contextvars.bound_contextvars(request_id="ab", trace_id="cd"):
        structlog.get_logger("test").info("accepted", num_tokens=3)
    line = json.loads(logs.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "service": "router",
        "id": "router-1",
        "request_id": "ab",
        "trace_id": "cd",
        "event": "accepted",
        "num_tokens": 3,
        "level": "info",
    }


def test_logs_of_libraries_look_the_same(logs: io.StringIO) -> None:
    configure_logging("router", "router-1", "info", "json", logs)
    logging.getLogger("uvicorn.error").warning("port %d", 8000)
    line = json.loads(logs.getvalue())
    assert (line["event"], line["service"], line["level"]) == ("port 8000", "router", "warning")


def test_the_level_is_obeyed(logs: io.StringIO) -> None:
    configure_logging("router", "router-1", "warning", "json", logs)
    structlog.get_logger("test").info("not this")
    logging.getLogger("other").info("nor this")
    structlog.get_logger("test").warning("this")
    assert [json.loads(line)["event"] for line in logs.getvalue().splitlines()] == ["this"]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_tracebacks_hold_no_local_variables(logs: io.StringIO, log_format: str) -> None:
    configure_logging("router", "router-1", "info", log_format, logs)
    prompt = "my secret " + "prompt"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        structlog.get_logger("test").exception("failed")
    assert "ValueError" in logs.getvalue() and "secret prompt" not in logs.getvalue()


def test_auto_is_json_where_nobody_looks(logs: io.StringIO) -> None:
    configure_logging("router", "router-1", "info", "auto", logs)
    structlog.get_logger("test").info("hello")
    assert json.loads(logs.getvalue())["event"] == "hello"


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


def test_a_trace_is_read_and_continued() -> None:
    context = parse_trace({"traceparent": PARENT, "tracestate": "a=1"})
    assert context == TraceContext(TRACE_ID, SPAN_ID, 1, "a=1")
    child = continue_trace(context.to_headers())
    assert (child.trace_id, child.flags, child.tracestate) == (TRACE_ID, 1, "a=1")
    assert child.span_id != SPAN_ID


def test_a_new_trace_is_valid() -> None:
    trace = new_trace()
    assert parse_trace(trace.to_headers()) == trace
    assert continue_trace({}).trace_id != trace.trace_id


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "-extra",
        PARENT + "0",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-0g",
        PARENT + "\n" + PARENT,
    ],
)
def test_malformed_parents_are_ignored(value: str) -> None:
    assert parse_trace({"traceparent": value}) is None


def test_later_versions_are_understood() -> None:
    context = parse_trace({"traceparent": f"01-{TRACE_ID}-{SPAN_ID}-03-more"})
    assert context == TraceContext(TRACE_ID, SPAN_ID, 1)
    assert context.to_headers() == {"traceparent": PARENT}


@pytest.mark.parametrize("state", ["x" * 513, "a=\x01", "a=é", "a=1\r\nX-Evil: 1"])
def test_a_bad_tracestate_is_dropped(state: str) -> None:
    context = parse_trace({"traceparent": PARENT, "tracestate": state})
    assert context is not None and context.tracestate == ""


@given(st.text(max_size=80))
def test_no_parent_breaks_the_parser(text: str) -> None:
    context = parse_trace({"traceparent": text})
    assert context is None or len(context.trace_id) == 32


def test_a_line_about_a_request_names_its_trace(logs: io.StringIO) -> None:
    configure_logging("scheduler", "scheduler-1", "info", "json", logs, {"ab": "cd"}.get)
    log = structlog.get_logger("test")
    log.info("known", request_id="ab")
    log.info("unknown", request_id="ef")
    log.info("told", request_id="ab", trace_id="gh")
    log.info("about none")
    lines = [json.loads(line) for line in logs.getvalue().splitlines()]
    assert [line.get("trace_id") for line in lines] == ["cd", None, "gh", None]
