"""The events of a response: their order, their numbers, and that they add up to the object."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from headrace_router.choices import ChoiceDelta, Delta, TokenText, Usage
from headrace_router.logprob_objects import TokenObject
from headrace_router.responses_api.response_object import About, Facts
from headrace_router.responses_api.writer import ResponseWriter
from headrace_router.tools import CallFormat, ToolUse
from headrace_shared.errors import Overloaded, RequestError, ServiceFailure
from headrace_shared.messages import FinishReason, TokenLogprobs

USAGE = Usage(7, 5, 3)
FACTS = Facts(response_id="resp_1", created=1000, model="m", temperature=0.5, top_p=1.0)
USE = ToolUse(format=CallFormat.TAGGED, names=("f", "g"), is_parallel=True)
CALLS = 'See.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>'


def writer(tools: ToolUse | None = None, starting_after: int = -1, **about: Any) -> ResponseWriter:
    return ResponseWriter(About(**about), FACTS, tools, None, lambda: 1234.5, starting_after)


def tokens(text: str, finish: FinishReason = FinishReason.STOP, size: int = 1) -> list[ChoiceDelta]:
    parts = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    ends = [None] * (len(parts) - 1) + [finish]
    return [
        ChoiceDelta(0, Delta(part, finish=end), i + 1) for i, (part, end) in enumerate(zip(parts, ends, strict=True))
    ]


def events_of(data: bytes) -> list[dict[str, Any]]:
    *blocks, end = data.decode().split("\n\n")
    assert end == ""
    events = []
    for block in blocks:
        if block == "data: [DONE]":
            continue
        name, told = block.split("\n")
        event = json.loads(told.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def told(made: ResponseWriter, deltas: Sequence[ChoiceDelta], size: int = 1) -> list[dict[str, Any]]:
    data = made.begin()
    for start in range(0, len(deltas), size):
        data += made.events(deltas[start : start + size])
    data += made.end(USAGE)
    assert data.endswith(b"data: [DONE]\n\n") and data.count(b"[DONE]") == 1
    return events_of(data)


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_events_of_a_text_come_in_order() -> None:
    events = told(writer(), tokens("abc"))
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["delta"] for event in events if "delta" in event] == ["a", "b", "c"]
    first, last = events[0]["response"], events[-1]["response"]
    assert first["status"] == "in_progress" and first["output"] == [] and first["usage"] is None
    assert last["status"] == "completed" and last["completed_at"] == 1234 and last["incomplete_details"] is None
    (item,) = last["output"]
    assert item == events[-2]["item"] and item["content"][0]["text"] == "abc" and item["status"] == "completed"
    items = {event["item_id"] for event in events if "item_id" in event}
    assert items == {item["id"]}
    assert last["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }


def test_nothing_is_told_of_an_answer_before_it_is_there() -> None:
    made = writer()
    assert kinds(events_of(made.begin())) == ["created", "in_progress"]
    assert made.events([]) == b"" and made.events([ChoiceDelta(0, Delta())]) == b""


def test_calls_are_items_of_their_own() -> None:
    events = told(writer(USE), tokens(CALLS))
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["message", "function_call", "function_call"]
    assert [(item["name"], item["arguments"]) for item in last["output"][1:]] == [("f", '{"a": 1}'), ("g", "{}")]
    assert len({item["call_id"] for item in last["output"][1:]}) == 2
    assert len({item["id"] for item in last["output"]}) == 3
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2]
    assert [event["item"] for event in done] == last["output"]
    assert added[1]["item"] == {**last["output"][1], "arguments": "", "status": "in_progress"}
    arguments = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in arguments if event["output_index"] == 1) == '{"a": 1}'
    ends = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["name"], event["arguments"]) for event in ends] == [("f", '{"a": 1}'), ("g", "{}")]
    assert all(event["item_id"] == last["output"][event["output_index"]]["id"] for event in arguments + ends)


@pytest.mark.parametrize("tools", [None, USE])
@pytest.mark.parametrize("text", ["", "abc", CALLS, CALLS + " tail"])
def test_whole_and_streamed_answers_are_the_same(text: str, tools: ToolUse | None) -> None:
    streamed = told(writer(tools), tokens(text))[-1]["response"]
    for size in (1, 3, 1000):
        whole = writer(tools)
        data = whole.whole([[event.delta for event in tokens(text, size=size)]], USAGE)
        assert json.loads(data) == streamed and whole.result == data


def test_an_answer_without_anything_is_an_empty_message() -> None:
    events = told(writer(), tokens(""))
    assert [item["content"][0]["text"] for item in events[-1]["response"]["output"]] == [""]
    assert "output_text.delta" not in kinds(events) and "output_text.done" in kinds(events)


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    for tools, text in ((None, "abc"), (USE, '<tool_call>{"name": "f", "arguments": {"a')):
        events = told(writer(tools), tokens(text, FinishReason.LENGTH))
        last = events[-1]
        assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["response"]["output"][-1]["status"] == "incomplete" and last["response"]["completed_at"] is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ServiceFailure("It broke."), "server_error"),
        (Overloaded("Too much.", retry_after_s=1.0), "rate_limit_exceeded"),
    ],
)
def test_a_failure_is_told_twice_and_ends_the_stream(error: RequestError, code: str) -> None:
    made = writer()
    data = made.begin() + made.events(tokens("abc")[:2]) + made.failure(error, "req-1")
    assert data.endswith(b"data: [DONE]\n\n")
    events = events_of(data)
    assert events[-2] == {
        "type": "error",
        "sequence_number": len(events) - 2,
        "code": error.code,
        "message": error.message,
        "param": None,
    }
    assert events[-1]["type"] == "response.failed" and "completed" not in kinds(events)
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"] == {"code": code, "message": error.message}
    assert failed["output"][0]["content"][0]["text"] == "ab" and failed["output"][0]["status"] == "incomplete"
    assert json.loads(made.result) == failed


def test_what_was_cancelled_did_not_fail() -> None:
    made = writer(background=True)
    events = events_of(made.begin() + made.failure(ServiceFailure("Enough.", code="cancelled"), ""))
    assert kinds(events) == ["created", "queued", "incomplete"]
    assert events[-1]["response"]["status"] == "cancelled" and events[-1]["response"]["error"] is None


def test_background_responses_begin_in_the_queue() -> None:
    made = writer(background=True)
    assert kinds(events_of(made.begin())) == ["created", "queued"]
    assert kinds(events_of(made.events(tokens("a")))) == [
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
    ]


@pytest.mark.parametrize("text", ["abc", CALLS])
def test_events_behind_any_number_are_the_rest(text: str) -> None:
    """However many tokens come at a time."""
    all_events = told(writer(USE, background=True), tokens(text))
    for starting_after in range(-1, len(all_events)):
        rest = told(writer(USE, starting_after, background=True), tokens(text), size=starting_after % 4 + 1)
        assert rest == all_events[starting_after + 1 :]


def test_log_probabilities_come_with_their_text() -> None:
    def format_tokens(given: Sequence[TokenText]) -> list[TokenObject]:
        return [TokenObject(str(token.token), -1.0, [], []) for token in given]

    made = ResponseWriter(About(), FACTS, None, format_tokens, lambda: 0.0)
    given = [
        ChoiceDelta(
            0, Delta("ab", (TokenText(1, 0, TokenLogprobs(-1.0, ())), TokenText(2, 1, TokenLogprobs(-1.0, ()))))
        ),
        ChoiceDelta(0, Delta("c", (TokenText(3, 2, TokenLogprobs(-1.0, ())),), FinishReason.STOP)),
    ]
    events = told(made, given)
    deltas = [[token["token"] for token in event["logprobs"]] for event in events if "delta" in event]
    assert deltas == [["1", "2"], ["3"]]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert [token["token"] for token in part["logprobs"]] == ["1", "2", "3"]
