"""Errors as Anthropic's API has them. Pure.

https://docs.anthropic.com/en/api/errors
"""

from typing import Any

from headrace_shared.errors import LimitReached, Overloaded, RequestError

_STATUS_OF_CODE = {"timeout": 504}
"""Where there is no status of ours that means the same."""
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
OVERLOADED = 529


def is_messages_path(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_status(error: RequestError, status: int) -> int:
    """`status`: as other APIs tell it."""
    if isinstance(error, Overloaded) and not isinstance(error, LimitReached):
        return OVERLOADED
    return _STATUS_OF_CODE.get(error.code, status)


def error_shape(error: RequestError, shown_id: str, status: int = 500) -> dict[str, Any]:
    """`status`: of a response that has not begun; an error in a stream has none."""
    status = error_status(error, status)
    kind = _TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "api_error")
    shape: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
    return {**shape, "request_id": shown_id} if shown_id else shape
