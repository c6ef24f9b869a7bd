"""Bytes of a request body to a schema, or an InvalidRequest that names the field."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace_shared.errors import InvalidRequest

T = TypeVar("T", bound=BaseModel)

MOST_MARKS: Mapping[tuple[bytes, ...], int] = {(b"[", b"{"): 100_000, (b":",): 200_000, (b",",): 2_000_000}
"""Marks of lists and objects, of keys, and of elements: how many a body may have."""
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_UNION_TAGS = {"str", "int", "float", "bool", "list", "dict", "none"}


def parse_body(kind: type[T], body: bytes) -> T:
    """Raises InvalidRequest for anything that is no JSON object of this kind."""
    _check_size(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


def _check_size(body: bytes) -> None:
    """A body of 16 MB may hold millions of objects, which take seconds to make: nobody else is answered meanwhile.
    Counting characters takes a millisecond a megabyte; those in texts count too, of which hardly a prompt that fits a
    context has as many."""
    for marks, most in MOST_MARKS.items():
        if sum(map(body.count, marks)) > most:
            raise InvalidRequest("The body has too many values.", code="payload_too_large")


def parse_fields(kind: type[T], fields: Mapping[str, Any]) -> T:
    """The same for fields that are decoded."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> InvalidRequest:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    # A union reports each of its branches; the one that got furthest is what the caller meant.
    worst = max(details, key=lambda detail: len(detail["loc"]))
    problem = worst["msg"]
    if worst["type"] == "json_invalid":
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
