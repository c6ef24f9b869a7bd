"""Errors name the fields that the client sent."""

import pytest

from headrace_router.field_names import FieldName, renamed
from headrace_router.messages_api.translation import FIELD_NAMES as MESSAGES
from headrace_router.responses_api.translation import FIELD_NAMES as RESPONSES
from headrace_shared.errors import InvalidRequest


@pytest.mark.parametrize(
    ("names", "param", "theirs"),
    [
        (RESPONSES, "messages", "input"),
        (RESPONSES, "max_completion_tokens", "max_output_tokens"),
        (RESPONSES, "response_format.json_schema.schema", "text.format.schema"),
        (RESPONSES, "response_format", "text.format"),
        (RESPONSES, "tools[2].function.name", "tools[2].name"),
        (RESPONSES, "tool_choice.function.name", "tool_choice.name"),
        (RESPONSES, "tool_choice", "tool_choice"),
        (RESPONSES, "temperature", "temperature"),
        (MESSAGES, "stop", "stop_sequences"),
        (MESSAGES, "stop_token_ids", "stop_token_ids"),
        (MESSAGES, "max_completion_tokens", "max_tokens"),
        (MESSAGES, "messages", "messages"),
        (MESSAGES, "user", "metadata.user_id"),
        (MESSAGES, "response_format.json_schema.schema", "output_config.format.schema"),
    ],
)
def test_names(names: tuple[FieldName, ...], param: str, theirs: str) -> None:
    error = renamed(InvalidRequest(f"'{param}' is wrong.", param=param, code="some_code"), names)
    assert (error.param, error.message, error.code) == (theirs, f"'{theirs}' is wrong.", "some_code")


def test_values_are_no_names() -> None:
    """A role may be called like a field."""
    message = "Invalid 'messages[0].role': input should be 'user' or 'assistant'."
    error = InvalidRequest(message, param="messages[0].role")
    assert renamed(error, MESSAGES).message == message
    told = renamed(error, RESPONSES)
    assert told.message == "Invalid 'input[0].role': input should be 'user' or 'assistant'."


def test_an_error_without_a_field_stays_as_it_is() -> None:
    error = InvalidRequest("The messages are wrong.")
    assert renamed(error, RESPONSES) is error
