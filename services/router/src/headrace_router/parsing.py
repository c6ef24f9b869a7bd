"""Bytes of a request body to a schema, or an InvalidRequest that names the field."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace_router.json_structure import Structure, check_numbers, check_structure
from headrace_router.number_lists import without_numbers
from headrace_router.parsed_size import parsed_size
from headrace_router.schemas import CompletionBody, DetokenizeBody, EmbeddingBody
from headrace_router.templates import RESERVED_NAMES
from headrace_shared.errors import InvalidRequest

T = TypeVar("T", bound=BaseModel)

MAX_INNER_DEPTH = 128
MAX_PARSED_BYTES = 24 << 20
"""Of memory: several large bodies are kept until their prompts are tokens."""

_NUMBERS: dict[type[BaseModel], str] = {CompletionBody: "prompt", EmbeddingBody: "input", DetokenizeBody: "tokens"}
"""Fields that may be long lists of token ids."""
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_LONE_SURROGATE = re.compile("unexpected end of hex escape|lone leading surrogate in hex escape")
"""As the parser says it of texts that were cut between the two halves of a character."""
_UNION_TAGS = {"str", "int", "float", "bool", "list", "dict", "none"}


def parse_body(kind: type[T], body: bytes) -> T:
    """Raises InvalidRequest for anything that is no JSON object of this kind."""
    check_structure(body)
    return _parse(kind, body)


def parse_long_body(kind: type[T], body: bytes) -> tuple[T, int]:
    """The same for one of megabytes, and how much memory it takes: for a thread, and with pauses for others."""
    check_structure(body)
    field = _NUMBERS.get(kind)
    rest, numbers = (body, None) if field is None else without_numbers(body, field)
    parsed = _parse(kind, rest)
    if field is not None and numbers is not None:
        setattr(parsed, field, numbers)
    num_bytes = parsed_size(parsed)
    if num_bytes > MAX_PARSED_BYTES:
        raise InvalidRequest("The request body takes too much memory.", code="payload_too_large")
    return parsed, num_bytes


def parse_arguments(text: str, param: str, structure: Structure) -> Any:
    """Of a function call: JSON in a string of a body. What is none stays the text that it is: models write such calls,
    and a conversation with one goes on. `structure`: of all of the call. Raises InvalidRequest."""
    structure.add(text.encode(errors="replace"))
    try:
        value = json.loads(text)
        is_too_deep = _is_deeper(value, MAX_INNER_DEPTH)
    except ValueError:
        return text
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise InvalidRequest(f"'{param}' is nested too deeply.", param=param, code="invalid_json")
    return value


def _parse(kind: type[T], body: bytes) -> T:
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None
    check_numbers(body)
    _refuse_templates(parsed)
    return parsed


def _is_deeper(value: Any, depth: int) -> bool:
    inner: list[Any] = [value]
    for _ in range(depth + 1):
        inner = [
            item
            for outer in inner
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not inner:
            return False
    return True


def _refuse_templates(body: BaseModel) -> None:
    """A template is a program, and only the model's own is run: on no endpoint may a client bring one."""
    given = (body.model_extra or {}) | {name: getattr(body, name) for name in type(body).model_fields}
    if given.get("chat_template") is not None:
        raise InvalidRequest(
            "'chat_template' is not supported: the model's own is used.",
            param="chat_template",
            code="unsupported_parameter",
        )
    variables = given.get("chat_template_kwargs")
    for name in variables if isinstance(variables, dict) else ():
        if name in RESERVED_NAMES or name.startswith("_"):
            param = "chat_template_kwargs"
            raise InvalidRequest(f"'{param}' may not set '{name[:64]}'.", param=param)


def parse_fields(kind: type[T], fields: Mapping[str, Any]) -> T:
    """The same for fields that are decoded."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> InvalidRequest:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    # A union reports each of its branches; the one that got furthest is what the caller meant.
    worst = max(details, key=lambda detail: _how_far(detail["loc"]))
    problem = worst["msg"]
    if worst["type"] == "json_invalid":
        problem = _LONE_SURROGATE.sub("half of a surrogate pair stands alone", problem)
        return InvalidRequest(
            f"The body is no valid JSON: {problem.removeprefix('Invalid JSON: ')}", code="invalid_json"
        )
    param = _param(worst["loc"])
    if param is None:
        return InvalidRequest("The body must be a JSON object.", code="invalid_type")
    if worst["type"] == "missing":
        return InvalidRequest(f"'{param}' is required.", param=param, code="missing_required_parameter")
    code = "invalid_type" if worst["type"].endswith("_type") else "invalid_value"
    return InvalidRequest(f"Invalid '{param}': {problem[:1].lower()}{problem[1:]}.", param=param, code=code)


def _how_far(location: Sequence[Any]) -> tuple[int, list[int]]:
    return len(location), [element for element in location if isinstance(element, int)]


def _param(location: Sequence[Any]) -> str | None:
    """As OpenAI writes it: messages[0].content. Pydantic's tags of union branches are left out."""
    param = ""
    for element in location:
        if isinstance(element, int):
            param += f"[{element}]"
        elif param and (element in _UNION_TAGS or not _FIELD.fullmatch(element)):
            continue
        else:
            param += f".{element}" if param else element
    return param or None
