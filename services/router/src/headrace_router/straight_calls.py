"""The short way to the endpoints that generate: innermost of our middlewares, before FastAPI's.

Between there and a handler FastAPI stacks contexts, looks for the route and solves dependencies that none of these has:
a fifth of what a router does for a call before it is queued. The routes exist all the same: they are described there,
and whatever is not exactly such a path and method goes to them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send


class StraightRoute(NamedTuple):
    """As `http_observer` names it."""

    path: str


class StraightCalls:
    def __init__(self, app: ASGIApp, *, calls: Mapping[str, Callable[[], ASGIApp]]) -> None:
        """`calls`: for each path what answers one POST."""
        self._app = app
        self._calls = {path: (StraightRoute(path), call) for path, call in calls.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._calls.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["route"], call = found
        await call()(scope, receive, send)
