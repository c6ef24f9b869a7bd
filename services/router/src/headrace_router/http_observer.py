"""Around the whole application: how long each HTTP request took, and its span where tracing is on.

Metric and span follow OpenTelemetry's conventions for HTTP servers. Responses get the headers that OpenAI's clients
show with every answer and error: `x-request-id`, and `openai-processing-ms`, for a stream the time to its beginning.
"""

import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_router.bodies import shown_request_id
from headrace_router.call import new_request_id
from headrace_router.metrics import RouterMetrics
from headrace_shared.trace_context import parse_trace
from headrace_shared.tracing import Span, Tracing, Value

SPAN = "headrace.span"
"""Where in the scope the request's span is."""
_QUIET = frozenset({"/health", "/live", "/metrics"})
"""Asked every few seconds, by machines."""
_RETRY_COUNT = b"x-stainless-retry-count"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


class HttpObserver:
    def __init__(self, app: ASGIApp, metrics: RouterMetrics, tracing: Tracing | None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        if any(name == _RETRY_COUNT and value.isdigit() and int(value[:9]) for name, value in scope["headers"]):
            self._metrics.client_retry()
        began_at = time.monotonic()
        span = self._begin(scope, method) if self._tracing is not None else None
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = _with_own_headers(message, scope, time.monotonic() - began_at)
            await send(message)

        if span is not None:
            scope[SPAN] = span
        try:
            await self._app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "")
            self._metrics.http_request(method, route, status, time.monotonic() - began_at)
            if span is not None:
                span.rename(f"{method} {route}" if route else method)
                span.set({"http.response.status_code": status, **({"http.route": route} if route else {})})
                span.end(error=str(status) if status >= 500 else None)

    def _begin(self, scope: Scope, method: str) -> Span | None:
        assert self._tracing is not None
        if scope["path"] in _QUIET:
            return None
        headers = Headers(scope=scope)
        attributes: dict[str, Value] = {
            "http.request.method": method,
            "url.scheme": scope.get("scheme", "http"),
            "network.protocol.version": scope.get("http_version", "1.1"),
        }
        server = scope.get("server")
        if server:
            attributes |= {"server.address": str(server[0]), "server.port": int(server[1] or 0)}
        return self._tracing.begin(method, "server", parse_trace(headers), attributes=attributes)


def _with_own_headers(message: Message, scope: Scope, seconds: float) -> Message:
    if scope["path"] in _QUIET:
        return message
    headers = [*message.get("headers", ()), (b"openai-processing-ms", b"%d" % round(1000 * seconds))]
    if not any(name == b"x-request-id" for name, _ in headers):  # else: a call's, which was logged by it
        headers.append((b"x-request-id", shown_request_id(Headers(scope=scope), new_request_id()).encode()))
    return {**message, "headers": headers}
