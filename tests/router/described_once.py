"""The description of the API is made once for all routers of this process: it takes as long as most tests."""

from typing import Any

from fastapi import FastAPI

from headrace_router import app as app_module
from headrace_router.openapi import describe

_made: dict[tuple[str, ...], dict[str, Any]] = {}
_is_described: set[int] = set()
_openapi = FastAPI.openapi


def openapi_once(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        routes = tuple(f"{type(route).__name__} {getattr(route, 'path', '')}" for route in app.routes)
        if routes not in _made:
            _made[routes] = _openapi(app)
        app.openapi_schema = _made[routes]
    return app.openapi_schema


def describe_once(document: dict[str, Any]) -> None:
    if id(document) not in _is_described:  # they stay in `_made`, so that no other one gets their ids
        describe(document)
        _is_described.add(id(document))


def install() -> None:
    setattr(FastAPI, "openapi", openapi_once)  # noqa: B010 - an assignment would need an ignore for mypy
    setattr(app_module, "describe", describe_once)  # noqa: B010 - as above
