"""Turns of Anthropic's Messages API to the messages of a chat. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_router.messages_api.schemas import ContentBlock, Turn
from headrace_shared.errors import InvalidRequest

TURN_BREAK = "\n\n"
"""Between turns of the same role, which become one."""


@dataclass
class _Said:
    """By one side, in one or more turns. Joined at the end: piece by piece the whole would be copied for each."""

    role: str
    texts: list[str]
    """Of each turn."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str | None = None

    def add(self, turn: "_Said") -> None:
        self.texts += turn.texts
        self.calls += turn.calls

    def message(self) -> dict[str, Any]:
        told: dict[str, Any] = {"role": self.role, "content": TURN_BREAK.join(text for text in self.texts if text)}
        if self.reasoning is not None:
            told["reasoning_content"] = self.reasoning
        if self.calls:
            told["tool_calls"] = self.calls
        return told


def chat_messages(system: str | Sequence[ContentBlock] | None, messages: Sequence[Turn]) -> list[dict[str, Any]]:
    """Results of tools come before what else the user says in the same turn. Raises InvalidRequest naming the field."""
    if not messages:
        raise InvalidRequest("'messages' must hold at least one message.", param="messages", code="empty_array")
    chat: list[_Said | dict[str, Any]] = []
    if system is not None and (text := _texts(system, "system")):
        chat.append({"role": "system", "content": text})
    known: set[str] = set()
    for number, message in enumerate(messages):
        where = f"messages[{number}].content"
        if message.role == "assistant":
            turn = _assistant(message.content, where)
            known.update(call["id"] for call in turn.calls)
            _add(chat, turn)
            continue
        chat += _results(message.content, known, where)
        blocks = [] if isinstance(message.content, str) else message.content
        if not blocks or any(block.type != "tool_result" for block in blocks):
            _add(chat, _Said(message.role, [_texts(message.content, where)]))
    return [told.message() if isinstance(told, _Said) else told for told in chat]


def _add(chat: list[_Said | dict[str, Any]], turn: _Said) -> None:
    last = chat[-1] if chat else None
    if isinstance(last, _Said) and last.role == turn.role:
        last.add(turn)
    else:
        chat.append(turn)


def _assistant(content: str | Sequence[ContentBlock], where: str) -> _Said:
    if isinstance(content, str):
        return _Said("assistant", [content])
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(content):
        here = f"{where}[{number}]"
        match block.type:
            case "text":
                texts.append(_needed(block.text, f"{here}.text"))
            case "tool_use":
                name = _needed(block.name, f"{here}.name")
                function = {"name": name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
                calls.append({"id": _needed(block.id, f"{here}.id"), "type": "function", "function": function})
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # nobody here can read it
            case _:
                raise _unknown(block, here)
    return _Said("assistant", ["".join(texts)], calls, "".join(thoughts) if thoughts else None)


def _results(content: str | Sequence[ContentBlock], known: set[str], where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return []
    results = []
    for number, block in enumerate(content):
        if block.type != "tool_result":
            continue
        here = f"{where}[{number}]"
        tool_use_id = _needed(block.tool_use_id, f"{here}.tool_use_id")
        if tool_use_id not in known:
            raise InvalidRequest(
                f"'{here}.tool_use_id' is of no 'tool_use' block before it.", param=f"{here}.tool_use_id"
            )
        text = _texts(block.content or "", f"{here}.content")
        told = f"Error: {text}" if block.is_error else text
        results.append({"role": "tool", "tool_call_id": tool_use_id, "content": told})
    return results


def _texts(content: str | Sequence[ContentBlock], where: str) -> str:
    """Blocks are simply joined, as everywhere."""
    if isinstance(content, str):
        return content
    texts = []
    for number, block in enumerate(content):
        here = f"{where}[{number}]"
        source = block.source or {}
        if block.type == "text":
            texts.append(_needed(block.text, f"{here}.text"))
        elif block.type == "document" and source.get("type") == "text" and isinstance(source.get("data"), str):
            texts.append(source["data"])
        elif block.type != "tool_result" or where == "system":
            raise _unknown(block, here)
    return "".join(texts)


def _needed(text: str | None, param: str) -> str:
    if text is None:
        raise InvalidRequest(f"'{param}' is required.", param=param, code="missing_required_parameter")
    return text


def _unknown(block: ContentBlock, where: str) -> InvalidRequest:
    return InvalidRequest(f"This model takes no content of type '{block.type[:32]}' here.", param=f"{where}.type")
