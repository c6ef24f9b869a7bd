"""What templates need to be told of tools and calls in another way than clients tell it. Pure.

Tools for models whose chat template knows none: told in the words of the Hermes format, in messages.

The format: https://github.com/NousResearch/Hermes-Function-Calling.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_BEGIN = (
    "You may call one or more of the functions below to help with the user's request.\n"
    "Their signatures, as JSON, one a line:\n<tools>\n"
)
_END = (
    "\n</tools>\n"
    "To call a function, write a JSON object with its name and its arguments between tags:\n"
    '<tool_call>\n{"name": "the function\'s name", "arguments": {"an argument": "its value"}}\n</tool_call>'
)


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tools in the system turn, and with calls and results as text. Chats that know neither tools
    nor calls are left as they are."""
    if not tools and not any(message.get("tool_calls") for message in messages):
        return [dict(message) for message in messages]
    told = [_as_text(message) for message in messages]
    if not tools:
        return told
    prompt = _BEGIN + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _END
    if told and told[0]["role"] in ("system", "developer"):
        return [{**told[0], "content": f"{told[0]['content']}\n\n{prompt}"}, *told[1:]]
    return [{"role": "system", "content": prompt}, *told]


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of calls as Mistral's templates want them, whoever made them: nine letters and digits, the
    same for the same id."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    shortened = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        shortened["tool_call_id"] = _short_id(message["tool_call_id"])
    if message.get("tool_calls"):
        shortened["tool_calls"] = [{**call, "id": _short_id(str(call.get("id", "")))} for call in message["tool_calls"]]
    return shortened


def _short_id(given: str) -> str:
    return given if _SHORT_ID.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = [
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False)
        for call in calls
    ]
    texts = [text for text in (message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in written)) if text]
    return {"role": message["role"], "content": "\n".join(texts)}
