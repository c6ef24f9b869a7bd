"""The trace that a caller's headers name, read with care."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_shared.trace_context import TraceContext, continue_trace, new_trace, parse_trace

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


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
