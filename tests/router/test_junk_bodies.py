"""Whatever is sent to the translated APIs becomes a chat, or an error that the client is told."""

import contextlib
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_router.messages_api.schemas import MessagesBody
from headrace_router.messages_api.translation import FIELD_NAMES as MESSAGES_NAMES
from headrace_router.messages_api.translation import translate as translate_message
from headrace_router.parsing import parse_body
from headrace_router.responses_api.items import items_of
from headrace_router.responses_api.schemas import ResponsesBody
from headrace_router.responses_api.translation import FIELD_NAMES, translate
from headrace_router.validation import validate_chat
from headrace_shared.errors import InvalidRequest
from tests.byte_model import make_card

CARD = make_card(context=4096)
WORDS = (
    *("message", "function_call", "function_call_output", "item_reference", "reasoning", "function", "auto", "any"),
    *("user", "assistant", "system", "developer", "text", "input_text", "output_text", "tool_use", "tool_result"),
    *("thinking", "document", "json_schema", "json_object", "allowed_tools", "tool", "{}", "", "a", "\x00", "🦉"),
)
FIELDS = (
    *("type", "role", "content", "text", "id", "call_id", "name", "arguments", "output", "tool_use_id", "input"),
    *("source", "data", "format", "schema", "mode", "tools", "function", "is_error", "effort", "parameters"),
    *("input_schema", "user_id", "summary", "thinking", "disable_parallel_tool_use"),
)
RESPONSES = (
    *("input", "instructions", "tools", "tool_choice", "text", "reasoning", "metadata", "include", "truncation"),
    *("store", "background", "max_output_tokens", "temperature", "top_logprobs", "stop", "n", "messages", "stream"),
)
MESSAGES = (
    *("messages", "system", "tools", "tool_choice", "stop_sequences", "metadata", "thinking", "output_config"),
    *("max_tokens", "temperature", "top_k", "stream", "mcp_servers"),
)
LEAVES = st.none() | st.booleans() | st.sampled_from(WORDS) | st.integers(-3, 2**70) | st.just(0.5)
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "system")), "content": JUNK},
    optional={"type": st.sampled_from(WORDS), "id": st.sampled_from(WORDS)},
)


def bodies(fields: tuple[str, ...], turns: str) -> st.SearchStrategy[dict[str, Any]]:
    given = st.dictionaries(st.sampled_from(fields), JUNK, max_size=4)
    base = {"model": st.just("tiny"), "max_tokens": st.just(9), turns: st.lists(TURN, min_size=1, max_size=3)}
    return st.tuples(st.fixed_dictionaries(base), given).map(lambda both: both[0] | both[1])


def in_own_words(error: InvalidRequest, names: Any) -> None:
    param = error.param or ""
    assert not any(param == name.ours for name in names if name.ours != "messages"), param


@settings(max_examples=300, deadline=None)
@given(bodies(RESPONSES, "input"))
def test_responses(body: dict[str, Any]) -> None:
    try:
        parsed = parse_body(ResponsesBody, json.dumps(body).encode())
        chat, about = translate(parsed, items_of(parsed.input, "resp_1", []))
    except InvalidRequest as error:
        in_own_words(error, FIELD_NAMES)
        return
    assert about.tools is not None
    with contextlib.suppress(InvalidRequest):  # told in the client's words
        validate_chat(chat, CARD, 1)


@settings(max_examples=300, deadline=None)
@given(bodies(MESSAGES, "messages"))
def test_messages(body: dict[str, Any]) -> None:
    try:
        chat = translate_message(parse_body(MessagesBody, json.dumps(body).encode()))
    except InvalidRequest as error:
        in_own_words(error, MESSAGES_NAMES)
        return
    with contextlib.suppress(InvalidRequest):
        validate_chat(chat, CARD, 1)
