"""Errors to HTTP: the only place that knows status codes and OpenAI's error shape. Anthropic's paths have their own."""

import math
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from headrace_router.admission import refusal
from headrace_router.messages_api.error_shape import error_shape, error_status, is_messages_path
from headrace_shared.errors import (
    BusError,
    Forbidden,
    InvalidRequest,
    LimitReached,
    ModelNotFound,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    ServiceFailure,
    Unauthorized,
)

_STATUS_OF_CODE = {
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "headers_too_large": 431,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_timeout": 408,
    "timeout": 408,
    "queue_full": 429,
    "request_not_found": 404,
    "response_not_found": 404,
    "previous_response_not_found": 404,
    "file_not_found": 404,
    "batch_not_found": 404,
    "file_in_use": 409,
    "batch_not_cancellable": 409,
    "idempotency_key_busy": 409,
    "answer_expired": 410,
    "idempotency_key_reused": 422,
}
"""Codes whose status differs from their class's."""
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout",
    429: "rate_limit_exceeded",
    500: "server_error",
    503: "service_unavailable",
    529: "service_unavailable",
}


class HttpError(NamedTuple):
    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def to_http(error: BaseException, request_id: str = "", path: str = "") -> HttpError:
    """Everything that is not ours becomes a 500 without details. `path`: that was asked for."""
    known = to_request_error(error)
    status = _status(known)
    headers = {}
    if isinstance(known, Overloaded):
        # Rounded up: who comes a moment too early is refused again.
        headers["retry-after"] = str(max(1, math.ceil(known.retry_after_s)))
    if known.code in ("timeout", "request_quarantined", "request_exceeds_limit", "insufficient_quota"):
        # SDKs retry a 408 and a 500, and the next try would take as long, or do as much harm.
        headers["x-should-retry"] = "false"
    if is_messages_path(path):
        if request_id:
            headers["request-id"] = request_id
        return HttpError(error_status(known, status), error_shape(known, request_id, status), headers)
    return HttpError(status, {"error": error_object(known, request_id)}, headers)


def error_object(error: RequestError, request_id: str = "") -> dict[str, Any]:
    """OpenAI's four keys, and the request id where there is one."""
    shape: dict[str, Any] = {
        "message": error.message,
        "type": _TYPE_OF_STATUS.get(_status(error), "invalid_request_error"),
        "param": error.param,
        "code": error.code,
    }
    return {**shape, "request_id": request_id} if request_id else shape


def to_request_error(error: BaseException) -> RequestError:
    match error:
        case RequestError():
            return error
        case PayloadTooLarge():
            message = "The request is too large for the queue: shorten the prompt or 'max_tokens'."
            return InvalidRequest(message, code="payload_too_large")
        case BusError():
            return refusal(error)
    return ServiceFailure("The server had an internal error.")


def error_response(
    error: BaseException, request_id: str = "", headers: dict[str, str] | None = None, path: str = ""
) -> Response:
    status, body, own_headers = to_http(error, request_id, path)
    return json_response(body, status, {**own_headers, **(headers or {})})


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _status(error: RequestError) -> int:
    if isinstance(error, Overloaded) and error.status is not None:
        return error.status
    if error.code in _STATUS_OF_CODE:
        return _STATUS_OF_CODE[error.code]
    match error:
        case Unauthorized():
            return 401
        case Forbidden():
            return 403
        case ModelNotFound():
            return 404
        case LimitReached():
            return 429
        case InvalidRequest():
            return 400
        case Overloaded():
            return 503
    return 500
