"""The messages of a call, and all that says how a template is to render them, checked. Pure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace_router.chat_messages import template_messages
from headrace_router.schemas import ChatBody, TokenizeBody
from headrace_router.template_variables import template_variables
from headrace_router.tool_prompt import with_short_ids, with_tools
from headrace_router.tools import MISTRAL_MARK
from headrace_shared.errors import InvalidRequest


class ValidChat(NamedTuple):
    messages: list[dict[str, Any]]
    """As a chat template takes them."""
    add_generation_prompt: bool
    template_variables: dict[str, Any]
    tools: list[dict[str, Any]]
    """Described for the template; empty: none."""
    continues: bool
    """The answer goes on with the last message, which is the assistant's."""

    @property
    def open_text(self) -> str:
        """Of a last message of the assistant: what the answer goes on with, or follows."""
        last = self.messages[-1]
        return str(last["content"]) if last["role"] == "assistant" else ""


def chat_of(body: ChatBody | TokenizeBody, template: str, described: Sequence[dict[str, Any]]) -> ValidChat:
    """`described`: the functions that the model is to know of. Raises InvalidRequest, naming the field."""
    if not body.messages:
        raise InvalidRequest("'messages' must hold at least one message.", param="messages", code="empty_array")
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise InvalidRequest(
                "'continue_final_message' cannot be combined with 'add_generation_prompt'.",
                param="continue_final_message",
            )
        last = body.messages[-1]
        if last.role != "assistant" or not last.content or last.tool_calls:
            raise InvalidRequest(
                "'continue_final_message' needs a last message with the assistant's text.",
                param="continue_final_message",
            )
    messages = template_messages(body.messages)
    if MISTRAL_MARK in template:  # such templates refuse ids of calls which are not as short as theirs
        messages = with_short_ids(messages)
    knows_tools = "tools" in template
    return ValidChat(
        messages=messages if knows_tools else with_tools(messages, list(described)),
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        template_variables=template_variables(body.chat_template_kwargs, body.reasoning_effort),
        tools=list(described) if knows_tools else [],
        continues=bool(body.continue_final_message),
    )
