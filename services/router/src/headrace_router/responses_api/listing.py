"""Pages of a response's input items. Pure."""

from typing import Any, Literal

from headrace_router.responses_api.items import Items
from headrace_shared.errors import InvalidRequest

MAX_PAGE = 100
DEFAULT_PAGE = 20


def page_of(items: Items, order: Literal["asc", "desc"], after: str | None, limit: int) -> dict[str, Any]:
    """`limit`: from 1 to MAX_PAGE. Raises InvalidRequest."""
    ordered = items if order == "asc" else items[::-1]
    start = 0
    if after is not None:
        found = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if found is None:
            raise InvalidRequest("'after' is the id of no item.", param="after")
        start = found + 1
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }
