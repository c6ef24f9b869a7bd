"""Bodies of many small pieces: what the event loop does with them takes time in proportion to their size.

Where the whole is copied for each piece, the largest of them stop all streams for ten seconds.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from headrace_router.json_structure import MAX_CONTAINERS, SMALL_BYTES
from headrace_router.messages_api.schemas import MessagesBody
from headrace_router.messages_api.translation import translate as translate_messages
from headrace_router.parsing import parse_body
from headrace_router.responses_api.items import MAX_ITEMS, items_of
from headrace_router.responses_api.schemas import ResponsesBody
from headrace_router.responses_api.translation import translate as translate_response
from headrace_router.schemas import ChatBody
from headrace_router.validation import validate_chat
from headrace_shared.errors import InvalidRequest
from tests.byte_model import make_card
from tests.growth import SIZES, assert_proportional

NUM_PIECES = MAX_CONTAINERS - 1000
TEXT = "x" * 300
CARD = make_card(context=10_000_000)
USER: dict[str, Any] = {"role": "user", "content": "a"}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def as_chat(body: dict[str, Any]) -> list[dict[str, Any]]:
    chat = parse_body(ChatBody, json.dumps({"model": "m", **body}).encode())
    return validate_chat(chat, CARD, 1)[0].messages


def from_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    parsed = parse_body(MessagesBody, json.dumps({"model": "m", "max_tokens": 5, **body}).encode())
    return validate_chat(translate_messages(parsed), CARD, 1)[0].messages


def from_response(body: dict[str, Any]) -> list[dict[str, Any]]:
    parsed = parse_body(ResponsesBody, json.dumps({"model": "m", **body}).encode())
    return validate_chat(translate_response(parsed, items_of(parsed.input, "resp_1", [])).body, CARD, 1)[0].messages


class Case(NamedTuple):
    read: Callable[[dict[str, Any]], list[dict[str, Any]]]
    body_of: Callable[[int], dict[str, Any]]
    """For a number of pieces."""
    num_chars_of: Callable[[int], int]
    most_pieces: int


CASES: dict[str, Case] = {
    "parts": Case(
        as_chat,
        lambda count: {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}] * count}]},
        lambda count: count * len(TEXT),
        NUM_PIECES,
    ),
    "blocks": Case(
        from_messages,
        lambda count: {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": TEXT}] * count}]},
        lambda count: count * len(TEXT) + 1,
        NUM_PIECES,
    ),
    "thoughts": Case(
        from_messages,
        lambda count: {
            "messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": TEXT}] * count}, USER]
        },
        lambda count: 1,
        NUM_PIECES,
    ),
    "turns": Case(
        from_messages,
        lambda count: {"messages": [{"role": "user", "content": TEXT}] * count},
        lambda count: count * (len(TEXT) + 2) - 2,
        NUM_PIECES,
    ),
    "texts behind a call": Case(
        from_response,
        lambda count: {"input": [CALL, *[{"role": "assistant", "content": TEXT + TEXT}] * count]},
        lambda count: count * 2 * len(TEXT),
        MAX_ITEMS - 1,
    ),
    "reasoning": Case(
        from_response,
        lambda count: {
            "input": [
                *[{"type": "reasoning", "content": [{"type": "reasoning_text", "text": TEXT}]}] * count,
                {"role": "assistant", "content": "b"},
            ]
        },
        lambda count: 1,
        NUM_PIECES // 3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_time_is_in_proportion_to_the_size(name: str) -> None:
    read, body_of, num_chars_of, most_pieces = CASES[name]

    def work_of(size: int) -> Callable[[], object]:
        count = most_pieces * size // SIZES[-1]
        body = body_of(count)

        def work() -> None:
            messages = read(body)
            # Calls are told as text, too.
            num_chars = num_chars_of(count)
            assert num_chars <= sum(len(message["content"]) for message in messages) < num_chars + 100

        return work

    assert_proportional(work_of)


@pytest.mark.parametrize(
    "read",
    [
        lambda arguments: as_chat(
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "c", "type": "function", "function": {"name": "f", "arguments": each}}
                            for each in arguments
                        ],
                    },
                ]
            }
        ),
        lambda arguments: from_response({"input": [{**CALL, "arguments": each} for each in arguments]}),
    ],
    ids=["chat", "response"],
)
def test_arguments_of_calls_hold_no_more_than_a_body_may_however_many_there_are(
    read: Callable[[list[str]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = '{"a": [' + ",".join(["[]"] * (SMALL_BYTES // 4)) + "]}"
    assert len(large) < SMALL_BYTES
    num_parsed = 0
    loads = json.loads

    def counting(text: str) -> Any:
        nonlocal num_parsed
        num_parsed += 1
        return loads(text)

    monkeypatch.setattr("headrace_router.parsing.json.loads", counting)
    with pytest.raises(InvalidRequest) as caught:
        read([large] * 200)
    assert caught.value.code == "payload_too_large"
    assert 1 <= num_parsed <= 2, "what is too much is not parsed"
    read([large])
    read(["{"])  # what is no JSON is text
