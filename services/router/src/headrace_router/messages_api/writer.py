"""Answers in the words of Anthropic's Messages API. Pure.

https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace_router.answer_pieces import AnswerPieces, CallBegins, Piece, TextPiece, part_id
from headrace_router.choices import ChoiceDelta, Delta, Usage
from headrace_router.messages_api.error_shape import error_shape
from headrace_router.tools import ToolUse
from headrace_router.typed_events import typed_event
from headrace_shared.errors import InvalidRequest, RequestError
from headrace_shared.messages import FinishReason

PREFIX = "msg_"
_UNUSED: Mapping[str, Any] = {
    "cache_creation": None,
    "inference_geo": None,
    "output_tokens_details": None,
    "server_tool_use": None,
    "service_tier": "standard",
}
"""Clients expect these fields of usage."""


class MessageFacts(NamedTuple):
    message_id: str
    shown_id: str
    """Of the request, as the client knows it."""
    model: str
    num_prompt_tokens: int
    max_tokens: int | None
    """As the client wants it; None: it fits."""


class MessageWriter:
    """Implements `writer.Writer`."""

    ping = typed_event("ping", {"type": "ping"})
    result = b""

    def __init__(self, facts: MessageFacts, tools: ToolUse | None) -> None:
        self._facts = facts
        self._pieces = AnswerPieces(tools)
        self._blocks: list[dict[str, Any]] = []
        self._parts: list[str] = []
        """Of the last block, which is open."""
        self._finish: FinishReason | None = None
        self._stop_sequence: str | None = None

    @property
    def model(self) -> str:
        return self._facts.model

    @property
    def headers(self) -> Mapping[str, str]:
        return {"request-id": self._facts.shown_id}

    def begin(self) -> bytes:
        usage = Usage(self._facts.num_prompt_tokens, 0, 0)
        return _event("message_start", message=self._message([], None, usage))

    def events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return b"".join(event for delta in deltas for event in self._push(delta.delta))

    def end(self, usage: Usage) -> bytes:
        delta = {"stop_reason": self._stop_reason(usage), "stop_sequence": self._stop_sequence}
        told = _event("message_delta", delta=delta, usage=_usage(usage))
        return b"".join(self._close()) + told + _event("message_stop")

    def failure(self, error: RequestError, shown_id: str) -> bytes:
        return typed_event("error", error_shape(error, shown_id, 400 if isinstance(error, InvalidRequest) else 500))

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        (parts,) = deltas
        for delta in parts:
            for _ in self._push(delta):
                pass
        for _ in self._close():
            pass
        return msgspec.json.encode(self._message(self._blocks, self._stop_reason(usage), usage))

    def _push(self, delta: Delta) -> Iterator[bytes]:
        if delta.finish is not None:
            self._finish = delta.finish
            self._stop_sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        for piece in self._pieces.push(delta):
            yield from self._piece(piece)

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        match piece:
            case TextPiece():
                if not piece.text:
                    return
                if not self._blocks or self._blocks[-1]["type"] != "text":
                    yield from self._open({"type": "text", "text": "", "citations": None})
                yield self._told({"type": "text_delta", "text": piece.text}, piece.text)
            case CallBegins():
                number = len(self._blocks)
                tool_use_id = part_id("toolu", self._facts.message_id, number)
                block = {"type": "tool_use", "id": tool_use_id, "name": piece.name, "input": {}}
                yield from self._open({**block, "caller": {"type": "direct"}})
            case _:
                yield self._told({"type": "input_json_delta", "partial_json": piece.text}, piece.text)

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._blocks.append(block)
        self._parts.clear()
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _told(self, delta: dict[str, Any], part: str) -> bytes:
        self._parts.append(part)
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if not self._blocks:
            return
        text = "".join(self._parts)
        block = self._blocks[-1]
        self._blocks[-1] = {**block, **({"text": text} if block["type"] == "text" else {"input": _input(text)})}
        yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _stop_reason(self, usage: Usage) -> str:
        if self._finish is FinishReason.LENGTH:
            most = self._facts.max_tokens
            is_full = most is not None and usage.completion_tokens < most
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._pieces.has_calls else "end_turn"

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._facts.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._facts.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._stop_sequence,
            "stop_details": None,
            "container": None,
            "usage": {**_usage(usage), **_UNUSED},
        }


def _input(text: str) -> dict[str, Any]:
    """The arguments of a call that was cut off are no JSON."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"INVALID_JSON": text}
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def _usage(usage: Usage) -> dict[str, int]:
    """The three kinds of input tokens add up to the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return typed_event(kind, {"type": kind, **fields})
