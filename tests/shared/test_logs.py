"""Logs: one line an event, without secrets, from libraries too."""

import io
import json
import logging

import pytest
import structlog

from headrace_shared.logs import configure_logging


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


def test_a_line_about_a_request_names_its_trace(logs: io.StringIO) -> None:
    configure_logging("scheduler", "scheduler-1", "info", "json", logs, {"ab": "cd"}.get)
    log = structlog.get_logger("test")
    log.info("known", request_id="ab")
    log.info("unknown", request_id="ef")
    log.info("told", request_id="ab", trace_id="gh")
    log.info("about none")
    lines = [json.loads(line) for line in logs.getvalue().splitlines()]
    assert [line.get("trace_id") for line in lines] == ["cd", None, "gh", None]
