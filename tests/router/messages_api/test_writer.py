"""The events of a message, and that they add up to the object."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from headrace_router.choices import ChoiceDelta, Delta, Usage
from headrace_router.messages_api.error_shape import error_shape, error_status
from headrace_router.messages_api.writer import MessageFacts, MessageWriter
from headrace_router.tools import CallFormat, ToolUse
from headrace_shared.errors import (
    Forbidden,
    InvalidRequest,
    LimitReached,
    ModelNotFound,
    Overloaded,
    RequestError,
    ServiceFailure,
    Unauthorized,
)
from headrace_shared.messages import FinishReason

USAGE = Usage(7, 5, 3)
USE = ToolUse(format=CallFormat.TAGGED, names=("f", "g"), is_parallel=True)
CALLS = 'See.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>'


def writer(tools: ToolUse | None = None, max_tokens: int | None = None) -> MessageWriter:
    return MessageWriter(MessageFacts("msg_1", "req-1", "m", 7, max_tokens), tools)


def tokens(text: str, end: Delta | None = None, size: int = 1) -> list[ChoiceDelta]:
    end = end or Delta(finish=FinishReason.STOP)
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    return [ChoiceDelta(0, Delta(part), i + 1) for i, part in enumerate(parts)] + [ChoiceDelta(0, end, len(parts))]


def events_of(data: bytes) -> list[dict[str, Any]]:
    *blocks, end = data.decode().split("\n\n")
    assert end == ""
    events = []
    for block in blocks:
        name, told = block.split("\n")
        events.append(json.loads(told.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def told(made: MessageWriter, deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
    return events_of(made.begin() + b"".join(made.events([delta]) for delta in deltas) + made.end(USAGE))


def add_up(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As a client does it."""
    message: dict[str, Any] = {}
    pieces: dict[int, str] = {}
    is_open: int | None = None
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert is_open is None and event["index"] == len(message["content"])
                is_open = event["index"]
                message["content"].append(event["content_block"])
                pieces[is_open] = ""
            case "content_block_delta":
                assert is_open is not None and event["index"] == is_open
                pieces[is_open] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
            case "content_block_stop":
                assert is_open is not None and event["index"] == is_open
                block = message["content"][is_open]
                if block["type"] == "text":
                    block["text"] = pieces[is_open]
                else:
                    block["input"] = json.loads(pieces[is_open] or "{}")
                is_open = None
            case "message_delta":
                assert is_open is None
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


def test_events_of_a_text_come_in_order() -> None:
    events = told(writer(), tokens("ab"))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["role"] == "assistant"
    assert start["usage"]["input_tokens"] == 7 and start["usage"]["output_tokens"] == 0
    assert events[1]["content_block"] == {"type": "text", "text": "", "citations": None}
    assert events[2]["delta"] == {"type": "text_delta", "text": "a"}
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 5,
    }


@pytest.mark.parametrize("tools", [None, USE])
@pytest.mark.parametrize("text", ["", "abc", CALLS, CALLS + " tail"])
def test_whole_and_streamed_messages_are_the_same(text: str, tools: ToolUse | None) -> None:
    streamed = add_up(told(writer(tools), tokens(text)))
    for size in (1, 3, 1000):
        whole = json.loads(writer(tools).whole([[event.delta for event in tokens(text, size=size)]], USAGE))
        assert whole == streamed


def test_calls_are_blocks_of_their_own() -> None:
    message = add_up(told(writer(USE), tokens(CALLS)))
    assert message["stop_reason"] == "tool_use"
    said, first, second = message["content"]
    assert said == {"type": "text", "text": "See.", "citations": None}
    assert (first["name"], first["input"], second["name"], second["input"]) == ("f", {"a": 1}, "g", {})
    assert first["id"].startswith("toolu_") and first["id"] != second["id"]


@pytest.mark.parametrize(
    ("end", "max_tokens", "reason", "sequence"),
    [
        (Delta(finish=FinishReason.STOP), None, "end_turn", None),
        (Delta(finish=FinishReason.STOP, stop_reason="zz"), None, "stop_sequence", "zz"),
        (Delta(finish=FinishReason.STOP, stop_reason=17), None, "end_turn", None),
        (Delta(finish=FinishReason.LENGTH), None, "max_tokens", None),
        (Delta(finish=FinishReason.LENGTH), 5, "max_tokens", None),
        (Delta(finish=FinishReason.LENGTH), 6, "model_context_window_exceeded", None),
    ],
)
def test_why_it_ended(end: Delta, max_tokens: int | None, reason: str, sequence: str | None) -> None:
    message = add_up(told(writer(max_tokens=max_tokens), tokens("ab", end)))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_a_call_that_was_cut_off_is_told_as_such() -> None:
    text, end = '<tool_call>{"name": "f", "arguments": {"a', Delta(finish=FinishReason.LENGTH)
    whole = json.loads(writer(USE).whole([[event.delta for event in tokens(text, end)]], USAGE))
    assert whole["content"][0]["input"] == {"INVALID_JSON": '{"a'} and whole["stop_reason"] == "max_tokens"


def test_a_failure_ends_the_stream() -> None:
    made = writer()
    data = made.begin() + made.events(tokens("ab")[:2]) + made.failure(ServiceFailure("It broke."), "req-1")
    last = events_of(data)[-1]
    assert last == {"type": "error", "error": {"type": "api_error", "message": "It broke."}, "request_id": "req-1"}
    assert made.headers == {"request-id": "req-1"} and events_of(made.ping) == [{"type": "ping"}]


@pytest.mark.parametrize(
    ("error", "status", "expected", "kind"),
    [
        (InvalidRequest("x"), 400, 400, "invalid_request_error"),
        (Unauthorized("x"), 401, 401, "authentication_error"),
        (Forbidden("x", code="c"), 403, 403, "permission_error"),
        (ModelNotFound("x"), 404, 404, "not_found_error"),
        (InvalidRequest("x", code="payload_too_large"), 413, 413, "request_too_large"),
        (LimitReached("x", retry_after_s=1.0), 429, 429, "rate_limit_error"),
        (Overloaded("x", retry_after_s=1.0, code="queue_full"), 429, 529, "overloaded_error"),
        (Overloaded("x", retry_after_s=1.0), 503, 529, "overloaded_error"),
        (ServiceFailure("x", code="timeout"), 408, 504, "timeout_error"),
        (ServiceFailure("x"), 500, 500, "api_error"),
    ],
)
def test_errors(error: RequestError, status: int, expected: int, kind: str) -> None:
    assert error_status(error, status) == expected
    assert error_shape(error, "", status)["error"]["type"] == kind
