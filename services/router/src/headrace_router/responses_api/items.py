"""What is said in a conversation, as the Responses API lists it: messages, function calls and their results. Pure."""

import re
from collections.abc import Sequence
from typing import Any

from headrace_router.answer_pieces import part_id
from headrace_router.json_structure import Structure
from headrace_router.parsing import parse_arguments
from headrace_router.responses_api.schemas import Item, Part
from headrace_shared.errors import InvalidRequest

MAX_ITEMS = 10_000

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_TEXT_PARTS = {"input_text", "output_text", "text"}

Items = list[dict[str, Any]]
"""As clients get them: each has an id, a type and a status."""


def items_of(given: str | Sequence[Item] | None, response_id: str, context: Items) -> Items:
    """The new items of a response, behind those of its `context`. No two have the same id: what a client calls as
    another item gets an id of its own. Raises InvalidRequest naming the field."""
    if given is None or (not isinstance(given, str) and not given):
        if context:
            return []
        raise InvalidRequest("'input' is required.", param="input", code="missing_required_parameter")
    if isinstance(given, str):
        return [_message(part_id("msg", response_id, -1), "user", given)]
    if len(given) > MAX_ITEMS:
        raise InvalidRequest(f"'input' may have at most {MAX_ITEMS} items.", param="input")
    ids = {item["id"] for item in context}
    calls = {item["call_id"] for item in context if item["type"] == "function_call"}
    items: Items = []
    arguments = Structure()
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if item.type == "item_reference":
            # It stands in the conversation already, and is not said again: each could be as large as a whole body.
            _check_known(item, ids, where)
            continue
        is_free = item.id is not None and item.id not in ids and _ID.fullmatch(item.id)
        own_id = str(item.id) if is_free else part_id(_prefix(item), response_id, -1 - number)
        made = _item(item, own_id, where, arguments)
        ids.add(made["id"])
        items.append(made)
        if made["type"] == "function_call" and made["status"] == "completed":
            calls.add(made["call_id"])
        elif made["type"] == "function_call_output" and made["call_id"] not in calls:
            raise InvalidRequest(
                f"'{where}.call_id' is of no function call before it.", param=f"{where}.call_id", code="invalid_value"
            )
    return items


def _item(item: Item, item_id: str, where: str, arguments: Structure) -> dict[str, Any]:
    match item.type or "message":
        case "message":
            if item.role is None:
                raise _missing(f"{where}.role")
            return _message(item_id, item.role, _text(item.content, f"{where}.content"))
        case "function_call":
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            for field, value in call.items():
                if value is None or (not value and field != "arguments"):
                    raise _missing(f"{where}.{field}")
            # One that was cut off is told again by clients, and answered by nobody.
            status = "incomplete" if item.status == "incomplete" else "completed"
            if item.arguments and status == "completed":
                parse_arguments(item.arguments, f"{where}.arguments", arguments)
            return {"id": item_id, "type": "function_call", **call, "status": status}
        case "function_call_output":
            if not item.call_id:
                raise _missing(f"{where}.call_id")
            output = _text(item.output, f"{where}.output")
            return {
                "id": item_id,
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": output,
                "status": "completed",
            }
        case "reasoning":
            texts = item.content if isinstance(item.content, list) else []
            content = [{"type": "reasoning_text", "text": part.text} for part in texts if part.text]
            return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": "completed"}
    raise InvalidRequest(
        f"Items of the type '{(item.type or '')[:32]}' are not supported.", param=f"{where}.type", code="invalid_value"
    )


def _check_known(item: Item, ids: set[str], where: str) -> None:
    if item.id not in ids:
        raise InvalidRequest(
            f"'{where}.id' is of no item of the previous response.", param=f"{where}.id", code="item_not_found"
        )


def _message(item_id: str, role: str, text: str) -> dict[str, Any]:
    if role == "assistant":
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
    else:
        part = {"type": "input_text", "text": text}
    return {"id": item_id, "type": "message", "role": role, "content": [part], "status": "completed"}


def _text(content: str | list[Part] | None, where: str) -> str:
    """Parts are simply joined, as everywhere."""
    if content is None:
        raise _missing(where)
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXT_PARTS | {"refusal"}:
            param = f"{where}[{number}].type"
            raise InvalidRequest(f"This model takes no content of type '{part.type[:32]}'.", param=param)
        if text is None:
            raise _missing(f"{where}[{number}].text")
        texts.append(text)
    return "".join(texts)


def _prefix(item: Item) -> str:
    return {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}.get(item.type or "", "msg")


def _missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' is required.", param=param, code="missing_required_parameter")
