"""The door: nothing behind it is reached without saying who asks, except what is named here.

An ASGI middleware, so that it decides by the path as it came, before any routing: there is no alias, encoding or
unknown path that leads around it. It also writes the caller's limits into every response.
"""

from collections.abc import Callable
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_router.http_errors import error_response
from headrace_router.identity import Identity
from headrace_router.key_table import KeyTable
from headrace_shared.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/live"})
METRICS_PATH = "/metrics"
PAGE_PATHS = frozenset({"/", "/dashboard"})
PAGE_FILES = "/dashboard/static/"
"""The live page's own files hold no data; what it shows, it asks for with a key."""
IDENTITY = "headrace.identity"
"""Key of the scope."""


class Door(NamedTuple):
    keys: KeyTable
    open_metrics: bool
    limit_headers: Callable[[Identity], list[tuple[bytes, bytes]]]
    has_pages: bool = False


class Authentication:
    def __init__(self, app: ASGIApp, *, door: Door, refused: Callable[[str], None]) -> None:
        """`refused` is told the code of each refusal."""
        self._app = app
        self._door = door
        self._open = OPEN_PATHS | ({METRICS_PATH} if door.open_metrics else set())
        if door.has_pages:
            self._open |= PAGE_PATHS
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            identity = self._door.keys.identify(headers.get("authorization", ""), headers.get("x-api-key", ""))
        except Unauthorized as error:
            self._refused(error.code)
            refusal = error_response(error, headers={"www-authenticate": "Bearer"}, path=scope["path"])
            await refusal(scope, receive, send)
            return
        scope[IDENTITY] = identity
        if identity.key is None:
            await self._app(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *self._door.limit_headers(identity)]}
            await send(message)

        await self._app(scope, receive, send_with_limits)

    def _is_open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if scope.get("raw_path", path.encode()) != path.encode():
            return False  # nobody needs to write these paths in another way
        return path in self._open or (self._door.has_pages and path.startswith(PAGE_FILES) and ".." not in path)


def identity_of(scope: Scope) -> Identity:
    """Of whoever got past the door."""
    identity: Identity = scope[IDENTITY]
    return identity
