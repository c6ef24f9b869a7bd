"""Chats encoded in this process, by the code of the process that renders templates."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from headrace_router.template_pool import Probes, read_probes, read_text
from headrace_router.template_process import Renderer
from headrace_router.templates import UNKNOWN, TemplateSpec
from headrace_router.tokenization import TextEncoder, load_encoder
from headrace_shared.fleet_messages import ModelCard

_RENDERER = Renderer()


async def learn(spec: TemplateSpec) -> Probes:
    return read_probes(_RENDERER.answer("learn", *json.loads(json.dumps(spec))))


def local_encoder(card: ModelCard) -> TextEncoder:
    return asyncio.run(load_encoder(card, learn))


def chat_ids(encoder: TextEncoder, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """With `add_generation_prompt` unless told otherwise."""
    given: dict[str, Any] = {"add_generation_prompt": True, "variables": {}, "max_chars": 1_000_000} | options
    return encoder.chat.ids(rendered(encoder, encoder.chat.message(messages, **given)).decode())


def rendered(encoder: TextEncoder, message: bytes) -> bytes:
    """What the process would answer. Raises InvalidRequest."""
    reply = _RENDERER.answer(*json.loads(message))
    if reply == UNKNOWN:
        _RENDERER.answer("learn", *encoder.chat.spec)
        reply = _RENDERER.answer(*json.loads(message))
    return read_text(reply)
