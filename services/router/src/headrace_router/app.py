"""The FastAPI application: routes, and errors in OpenAI's shape for everything that goes wrong outside of them."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from headrace_router.authentication import Authentication
from headrace_router.bodies import ClientGone
from headrace_router.browser_guard import BrowserGuard
from headrace_router.dashboard.pages import make_dashboard_router
from headrace_router.description import DESCRIPTION_PATH, Description
from headrace_router.http_errors import error_response
from headrace_router.http_observer import HttpObserver
from headrace_router.routes import Parts, make_router, straight_calls
from headrace_router.straight_calls import StraightCalls
from headrace_shared.errors import BusError, InvalidRequest, RequestError


def make_app(parts: Parts) -> FastAPI:
    # No interactive documentation: its pages load scripts from elsewhere.
    # No redirects: they would lead to whatever host the client named.
    # No telemetry of its own: it would see each send of a stream, and put what clients wrote into its logs.
    off: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
    app = FastAPI(
        title="Headrace", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=off
    )
    app.include_router(make_router(parts))
    for more in parts.more:
        app.include_router(more)
    if parts.dashboard is not None:
        app.include_router(make_dashboard_router(parts.dashboard))
    app.add_middleware(StraightCalls, calls=straight_calls(parts))
    app.add_middleware(Authentication, door=parts.door, refused=parts.metrics.refused)
    app.add_middleware(BrowserGuard, guard=parts.guard, refused=parts.metrics.refused)
    # The outermost: it sees refusals too.
    tracing = parts.traces.tracing if parts.traces is not None else None
    app.add_middleware(HttpObserver, metrics=parts.metrics, tracing=tracing)
    app.state.description = Description(app)
    app.add_route(DESCRIPTION_PATH, app.state.description.answer, include_in_schema=False)
    for kind in (RequestError, BusError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error, path=request.scope["path"])


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    path = str(request.scope["path"])
    headers = dict(error.headers or {})
    if error.status_code == 404:
        problem = InvalidRequest(
            f"There is no {path[:128]}{_meant(path, request.app.state.description)}", code="not_found"
        )
    elif error.status_code == 405:
        problem = InvalidRequest(f"{request.method} is not allowed here.", code="method_not_allowed")
        headers["Allow"] = ", ".join(sorted({headers.get("Allow", ""), *_methods(path, request.app)} - {""}))
    else:
        problem = InvalidRequest(str(error.detail)[:200])
    return error_response(problem, headers=headers, path=path)


def _methods(path: str, app: FastAPI) -> set[str]:
    """Of all routes with this path; the framework names those of one of them."""
    described = app.openapi()["paths"].items()
    return {method.upper() for known, methods in described if compile_path(known)[0].match(path) for method in methods}


def _meant(path: str, description: Description) -> str:
    """What was meant by a client whose base address lacks /v1, or has it once too often."""
    close = {f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/")} - {path}
    known = sorted(close & description.paths)
    return f"; did you mean {known[0]}?" if known else "."


async def _on_validation_error(_: Request, error: Exception) -> Response:
    """Of parameters in the path or the query; bodies are read elsewhere."""
    assert isinstance(error, RequestValidationError), error
    param = str(error.errors()[0]["loc"][-1])[:64]
    return error_response(InvalidRequest(f"'{param}' is not valid.", param=param))


async def _on_client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
