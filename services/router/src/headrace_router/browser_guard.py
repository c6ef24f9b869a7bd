"""What keeps other people's web pages away from this server, whose users' browsers could reach it.

- A page whose name was pointed here is refused by that name (`host_names.py`).
- Calls that pages of other origins send are refused, unless the origin is listed: their answers would be kept from the
  page, but they would have been made.
- Listed origins get the headers by which browsers let them read answers. By default none is listed.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_router.authentication import OPEN_PATHS
from headrace_router.host_names import HostNames
from headrace_router.http_errors import error_response
from headrace_shared.errors import ConfigError, Forbidden

_ORIGIN = re.compile(r"(?:[a-z][a-z0-9+.-]*)://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
"""Desktop applications and extensions of browsers have schemes of their own."""
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, DELETE",
    "access-control-allow-headers": "*, authorization",
    "access-control-max-age": "600",
}


class Origins:
    def __init__(self, listed: Sequence[str], *, has_keys: bool) -> None:
        """Raises ConfigError."""
        for origin in listed:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError("cors_origins", f"{origin!r} is no origin, such as https://app.example.com, or *")
        if "*" in listed and not has_keys:
            raise ConfigError("cors_origins", "* would let every web page use this server: it needs require_keys")
        self._listed = frozenset(origin.lower() for origin in listed)

    def has(self, origin: str) -> bool:
        return "*" in self._listed or origin.lower() in self._listed


class Guard(NamedTuple):
    hosts: HostNames
    origins: Origins


class BrowserGuard:
    def __init__(self, app: ASGIApp, *, guard: Guard, refused: Callable[[str], None]) -> None:
        """`refused` is told the code of each refusal."""
        self._app = app
        self._hosts, self._origins = guard
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        problem = self._problem(scope["method"], scope["path"], headers)
        if problem is not None:
            self._refused(problem.code)
            await error_response(problem)(scope, receive, send)
            return
        origin = headers.get("origin")
        if origin is None or not self._origins.has(origin):
            await self._app(scope, receive, send)
            return
        allowed = [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"*"),
            (b"vary", b"origin"),
        ]

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *allowed]}
            await send(message)

        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, send_allowed)
            return
        await self._app(scope, receive, send_allowed)

    def _problem(self, method: str, path: str, headers: Headers) -> Forbidden | None:
        host = headers.get("host", "")
        # HTTP/1.0 may have none; browsers always send it. Probes use whatever name or address they found, and what they
        # are told is no secret.
        if path not in OPEN_PATHS and host and not self._hosts.admits(host):
            return Forbidden("This host name is not listed in the setting 'allowed_hosts'.", code="host_not_allowed")
        origin = headers.get("origin")
        if method in _READS or origin is None or self._origins.has(origin):
            return None
        # The second word is the browser's own, and holds where a proxy has changed the host.
        is_own = origin.partition("://")[2].lower() == host.lower() or headers.get("sec-fetch-site") == "same-origin"
        if is_own:
            return None
        return Forbidden("This origin is not listed in the setting 'cors_origins'.", code="origin_not_allowed")
