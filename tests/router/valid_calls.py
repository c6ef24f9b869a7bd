"""Calls as validation passes them on: parameters with defaults from a card, and what a test changes of them."""

import json
from typing import Any

from headrace_router.parsing import parse_body
from headrace_router.schemas import ChatBody, CompletionBody
from headrace_router.valid_chat import ValidChat
from headrace_router.validation import ValidParams, validate_chat, validate_completion
from headrace_shared.fleet_messages import ModelCard
from tests.byte_model import MODEL, make_card

CARD = make_card(temperature=0.6, top_p=0.9)
VOCAB = CARD.vocab_size
MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(card: ModelCard = CARD, /, **fields: Any) -> tuple[ValidChat, ValidParams]:
    body = {"model": MODEL, "messages": MESSAGES, **fields}
    return validate_chat(parse_body(ChatBody, json.dumps(body).encode()), card, random_seed=5)


def completion(**fields: Any) -> tuple[Any, ValidParams]:
    body = {"model": MODEL, "prompt": "Hi", **fields}
    return validate_completion(parse_body(CompletionBody, json.dumps(body).encode()), CARD, random_seed=5)
