"""Paths of the live page to handlers."""

from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response, StreamingResponse

from headrace_router import sse
from headrace_router.authentication import identity_of
from headrace_router.bodies import BodyLimits, read_json_body
from headrace_router.dashboard.collector import Collector
from headrace_router.dashboard.files import INDEX, read_files
from headrace_router.dashboard.flood_plan import parse_plan
from headrace_router.dashboard.flooding import Flooding
from headrace_router.dashboard.inspector import Inspector
from headrace_router.dashboard.live import Watchers
from headrace_router.http_errors import json_response
from headrace_router.models import Models
from headrace_shared.errors import InvalidRequest

BODY_LIMITS = BodyLimits(16 * 1024, 10.0)
OWN_HEADER = "headrace-dashboard"
"""What only a page of ours sends: another site's would need a leave that nobody gives."""


class Dashboard(NamedTuple):
    """What the handlers need."""

    boot: str
    collector: Collector
    watchers: Watchers
    inspector: Inspector
    flooding: Flooding
    models: Models


def make_dashboard_router(dashboard: Dashboard) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    pages = read_files()
    api = "/dashboard/api"

    @router.head("/")
    @router.get("/")
    async def root() -> Response:
        return RedirectResponse("/dashboard", 307)

    @router.head("/dashboard")
    @router.get("/dashboard")
    async def page(request: Request) -> Response:
        return pages[INDEX].respond(request.headers.get("if-none-match"))

    @router.get("/dashboard/static/{path:path}")
    async def static(request: Request, path: str) -> Response:
        if path not in pages:
            raise InvalidRequest("There is no such file.", code="not_found")
        return pages[path].respond(request.headers.get("if-none-match"))

    @router.get(f"{api}/live")
    async def live() -> Response:
        dashboard.watchers.check()
        return StreamingResponse(dashboard.watchers.stream(dashboard.boot), headers=sse.HEADERS)

    @router.get(f"{api}/frames")
    async def frames(request: Request) -> Response:
        first, last = (_number(request, name) for name in ("first", "last"))
        data = dashboard.collector.history.frames(first, last)
        return Response(data, media_type="application/json")

    @router.get(f"{api}/requests")
    async def requests(request: Request) -> Response:
        return json_response(dashboard.inspector.recent(identity_of(request.scope).owner))

    @router.get(f"{api}/requests/{{request_id}}")
    async def story(request: Request, request_id: str) -> Response:
        return json_response(await dashboard.inspector.story(identity_of(request.scope).owner, request_id))

    @router.post(f"{api}/flood")
    async def flood(request: Request) -> Response:
        _require_own_page(request.headers)
        plan = parse_plan(await read_json_body(request.headers, request.receive, BODY_LIMITS))
        model = plan.model or next((model.card.model for model in dashboard.models.all()), "")
        dashboard.models.get(model)
        dashboard.flooding.check()
        return StreamingResponse(dashboard.flooding.stream(plan, model, request.scope), headers=sse.HEADERS)

    return router


def _require_own_page(headers: Headers) -> None:
    if OWN_HEADER not in headers:
        raise InvalidRequest(f"The header {OWN_HEADER} is missing.", param=OWN_HEADER)


def _number(request: Request, name: str) -> int:
    given = request.query_params.get(name, "")
    if not given.isascii() or not given.isdigit() or len(given) > 12:
        raise InvalidRequest(f"{name} must be a number of a frame.", param=name)
    return int(given)
