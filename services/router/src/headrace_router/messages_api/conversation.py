"""Turns of Anthropic's Messages API to the messages of a chat. Pure."""

import json
from collections.abc import Sequence
from typing import Any

from headrace_router.messages_api.schemas import ContentBlock, Turn
from headrace_shared.errors import InvalidRequest

TURN_BREAK = "\n\n"
"""Between turns of the same role, which become one."""


def chat_messages(system: str | Sequence[ContentBlock] | None, messages: Sequence[Turn]) -> list[dict[str, Any]]:
    """Results of tools come before what else the user says in the same turn. Raises InvalidRequest naming the field."""
    if not messages:
        raise InvalidRequest("'messages' must hold at least one message.", param="messages", code="empty_array")
    chat: list[dict[str, Any]] = []
    if system is not None and (text := _texts(system, "system")):
        chat.append({"role": "system", "content": text})
    known: set[str] = set()
    for number, message in enumerate(messages):
        where = f"messages[{number}].content"
        if message.role == "assistant":
            turn = _assistant(message.content, where)
            known.update(call["id"] for call in turn.get("tool_calls", ()))
            _add(chat, turn)
            continue
        for told in _results(message.content, known, where):
            chat.append(told)
        blocks = [] if isinstance(message.content, str) else message.content
        if not blocks or any(block.type != "tool_result" for block in blocks):
            _add(chat, {"role": message.role, "content": _texts(message.content, where)})
    return chat


def _add(chat: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    last = chat[-1] if chat else None
    if last is None or last["role"] != turn["role"]:
        chat.append(turn)
        return
    last["content"] = TURN_BREAK.join(text for text in (last["content"], turn["content"]) if text)
    if calls := [*last.get("tool_calls", ()), *turn.get("tool_calls", ())]:
        last["tool_calls"] = calls


def _assistant(content: str | Sequence[ContentBlock], where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for number, block in enumerate(content):
        here = f"{where}[{number}]"
        match block.type:
            case "text":
                turn["content"] += _needed(block.text, f"{here}.text")
            case "tool_use":
                name = _needed(block.name, f"{here}.name")
                function = {"name": name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
                calls.append({"id": _needed(block.id, f"{here}.id"), "type": "function", "function": function})
            case "thinking":
                turn["reasoning_content"] = turn.get("reasoning_content", "") + (block.thinking or "")
            case "redacted_thinking":
                pass  # nobody here can read it
            case _:
                raise _unknown(block, here)
    if calls:
        turn["tool_calls"] = calls
    return turn


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
