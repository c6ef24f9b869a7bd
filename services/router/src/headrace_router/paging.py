"""Lists in pages, as OpenAI's API has them. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from headrace_shared.errors import InvalidRequest

T = TypeVar("T")

_NUMBER = re.compile(r"[0-9]{1,6}")


def query_schemas(default_limit: int, max_limit: int) -> dict[str, dict[str, Any]]:
    """For the API's description."""
    limit = {"type": "integer", "minimum": 1, "maximum": max_limit, "default": default_limit}
    order = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}
    return {"limit": limit, "after": {"type": "string"}, "order": order}


class PageQuery(NamedTuple):
    limit: int
    after: str | None = None
    """Id of the last item of the page before."""
    order: Literal["asc", "desc"] = "desc"


def read_query(query: Mapping[str, str], default_limit: int, max_limit: int) -> PageQuery:
    """Raises InvalidRequest, naming the parameter."""
    given = query.get("limit", str(default_limit))
    limit = int(given) if _NUMBER.fullmatch(given) else 0
    if not 1 <= limit <= max_limit:
        raise InvalidRequest(f"'limit' must be from 1 to {max_limit}.", param="limit")
    order = query.get("order", "desc")
    if order != "asc" and order != "desc":
        raise InvalidRequest("'order' must be asc or desc.", param="order")
    return PageQuery(limit, query.get("after") or None, "asc" if order == "asc" else "desc")


def page(
    newest_first: Sequence[T], query: PageQuery, id_of: Callable[[T], str], shown: Callable[[T], Any]
) -> dict[str, Any]:
    """A list object. Raises InvalidRequest if `after` names nothing."""
    items = list(newest_first) if query.order == "desc" else list(reversed(newest_first))
    start = 0
    if query.after is not None:
        found = next((index for index, item in enumerate(items) if id_of(item) == query.after), None)
        if found is None:
            raise InvalidRequest(f"There is no '{query.after[:64]}' to go on behind.", param="after")
        start = found + 1
    chosen = items[start : start + query.limit]
    return {
        "object": "list",
        "data": [shown(item) for item in chosen],
        "first_id": id_of(chosen[0]) if chosen else None,
        "last_id": id_of(chosen[-1]) if chosen else None,
        "has_more": start + query.limit < len(items),
    }
