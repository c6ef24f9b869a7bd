"""Items of a conversation to the messages of a chat. Pure."""

from collections.abc import Iterable
from typing import Any

import msgspec

from headrace_router.responses_api.items import Items


def chat_messages(instructions: str | None, items: Items) -> list[dict[str, Any]]:
    """A function call belongs to the assistant's turn before it, if there is one."""
    # What is said piece by piece is joined at the end: else the whole would be copied for each.
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    reasoning: list[str] = []
    for item in items:
        match item["type"]:
            case "reasoning":
                reasoning.extend(_texts(item))
                continue
            case "message":
                _say(messages, item["role"], "".join(_texts(item)))
            case "function_call" if item["status"] == "incomplete":
                continue  # its arguments were cut off: nobody could have answered it
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                _turn_of_assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = "".join(reasoning)
        reasoning = []
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = "".join(message["content"])
    return messages


def _say(messages: list[dict[str, Any]], role: str, text: str) -> None:
    if role == "assistant" and messages and messages[-1].get("tool_calls"):
        said = messages[-1]["content"]
        if isinstance(said, list):
            said.append(text)
        else:
            messages[-1]["content"] = [said or "", text]
    else:
        messages.append({"role": role, "content": text})


def _turn_of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _texts(item: dict[str, Any]) -> Iterable[str]:
    return (part["text"] for part in item["content"])


def num_droppable(items: Items) -> int:
    return len(_droppable(items))


def num_excess(items: Items, fitting: float) -> int:
    """Of the oldest that may be dropped: about so many do not fit, if `fitting` (0 to 1) of all of it does. At least
    one."""
    sizes = [len(msgspec.json.encode(item)) for item in items]
    left = sum(sizes) * (1.0 - fitting)
    droppable = _droppable(items)
    for number, index in enumerate(droppable, start=1):
        left -= sizes[index]
        if left <= 0.0:
            return number
    return len(droppable)


def shortened(items: Items, num_dropped: int) -> Items:
    """Without the oldest so many that may be dropped. Results of calls that are gone go too."""
    dropped = set(_droppable(items)[:num_dropped])
    kept = [item for i, item in enumerate(items) if i not in dropped]
    calls = {item["call_id"] for item in kept if item["type"] == "function_call"}
    return [item for item in kept if item["type"] != "function_call_output" or item["call_id"] in calls]


def _droppable(items: Items) -> list[int]:
    """All but instructions, and what the user said last and what came of it."""
    last = max((i for i, item in enumerate(items) if item.get("role") == "user"), default=len(items) - 1)
    return [i for i, item in enumerate(items[:last]) if item.get("role") not in ("system", "developer")]
