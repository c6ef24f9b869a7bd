"""Forms and rules about tokens, where a model's workers keep none."""

from typing import Any

import pytest

from headrace_router.schemas import ChatBody, CompletionBody
from headrace_router.validation import validate_chat, validate_completion
from headrace_shared.errors import InvalidRequest
from headrace_shared.fleet_messages import ModelCard
from tests.byte_model import make_card
from tests.router.valid_calls import MESSAGES

CONSTRAINTS: list[tuple[str, dict[str, Any]]] = [
    ("response_format", {"response_format": {"type": "json_object"}}),
    (
        "response_format.json_schema.schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    ),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "a"}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["a"]}}),
    ("regex", {"regex": "a"}),
    ("ebnf", {"ebnf": 'root ::= "a"'}),
    ("allowed_token_ids", {"allowed_token_ids": [5]}),
    ("bad_words", {"bad_words": ["a"]}),
]


@pytest.mark.parametrize(("param", "fields"), CONSTRAINTS, ids=[param for param, _ in CONSTRAINTS])
def test_what_no_worker_of_a_model_can_keep_to_is_refused_before_it_is_queued(
    param: str, fields: dict[str, Any]
) -> None:
    card = make_card(constrained_decoding=False)

    def ask_chat(card: ModelCard) -> None:
        body = {"model": card.model, "messages": MESSAGES, **fields}
        validate_chat(ChatBody.model_validate(body), card, 1)

    def ask_text(card: ModelCard) -> None:
        validate_completion(CompletionBody.model_validate({"model": card.model, "prompt": "a", **fields}), card, 1)

    for ask in (ask_chat, ask_text):
        ask(make_card())
        with pytest.raises(InvalidRequest) as caught:
            ask(card)
        assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
    validate_chat(ChatBody.model_validate({"model": card.model, "messages": MESSAGES}), card, 1)


def test_a_function_that_must_be_called_is_a_form_too() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    card = make_card(constrained_decoding=False)
    for choice, is_refused in (("required", True), (tool, True), ("auto", False), ("none", False)):
        fields = {"model": card.model, "messages": MESSAGES, "tools": [tool], "tool_choice": choice}
        body = ChatBody.model_validate(fields)
        if not is_refused:
            validate_chat(body, card, 1)
            continue
        with pytest.raises(InvalidRequest) as caught:
            validate_chat(body, card, 1)
        assert caught.value.code == "unsupported_parameter"
