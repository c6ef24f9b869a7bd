"""The API's description as it is served: made when somebody asks for the first time.

To make it takes half a second of a processor. At each start that would be a good part of the way to the first answer,
and on the event loop it would stop every stream.
"""

import asyncio

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.requests import Request
from starlette.responses import Response

from headrace_router.openapi import describe

DESCRIPTION_PATH = "/openapi.json"


class Description:
    """Of an application whose routes do not change any more."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._turn = asyncio.Lock()
        self._document = b""
        self._paths: frozenset[str] = frozenset()

    @property
    def paths(self) -> frozenset[str]:
        """That are described, with {names} for what varies in them."""
        if not self._paths:
            contexts = iter_route_contexts(self._app.routes)
            described = (each for each in contexts if isinstance(each.original_route, APIRoute))
            self._paths = frozenset(each.path for each in described if each.path and each.include_in_schema)
        return self._paths

    async def answer(self, _: Request) -> Response:
        async with self._turn:
            self._document = self._document or await asyncio.to_thread(self._make)
        return Response(self._document, media_type="application/json")

    def _make(self) -> bytes:
        document = self._app.openapi()
        describe(document)
        return msgspec.json.encode(document)
