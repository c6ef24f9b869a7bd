"""Paths to handlers. No logic."""

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace_router.authentication import Door, identity_of
from headrace_router.bodies import read_json_body
from headrace_router.call import Call
from headrace_router.call_options import HEADERS, LAST_EVENT_ID
from headrace_router.call_response import CallResponse, ClientLimits
from headrace_router.call_trace import CallTraces
from headrace_router.calls import Caller
from headrace_router.dashboard.pages import Dashboard
from headrace_router.http_errors import json_response
from headrace_router.metrics import RouterMetrics
from headrace_router.models import Models
from headrace_router.parsing import parse_body
from headrace_router.requests import check_length
from headrace_router.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from headrace_router.tokenization import PromptPool
from headrace_shared.messages import ModelCard
from headrace_shared.telemetry import METRICS_CONTENT_TYPE

SCHEMA_REF = "#/components/schemas/{model}"
BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)


class Parts(NamedTuple):
    """What the handlers need."""

    caller: Caller
    models: Models
    pool: PromptPool
    metrics: RouterMetrics
    limits: ClientLimits
    not_ready: Callable[[], str | None]
    door: Door
    dashboard: Dashboard | None = None
    """None: switched off."""
    traces: CallTraces | None = None
    """None: nothing is traced."""


def make_router(parts: Parts) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_takes(ChatBody, HEADERS))
    async def chat_completions() -> Response:
        return CallResponse(parts.caller.chat, parts.limits, parts.metrics, parts.traces)

    @router.post("/v1/completions", openapi_extra=_takes(CompletionBody, HEADERS))
    async def completions() -> Response:
        return CallResponse(parts.caller.completion, parts.limits, parts.metrics, parts.traces)

    @router.get("/v1/requests/{request_id}", openapi_extra=_hears({LAST_EVENT_ID: HEADERS[LAST_EVENT_ID]}))
    async def resume(request: Request, request_id: str, wait: bool = True) -> Response:
        """The answer to a call that may be resumed, from behind the header Last-Event-ID. `wait=false`: only what has
        become of it so far: its place in the queue and the expected wait, say."""
        if not wait:
            return json_response(await parts.caller.status(identity_of(request.scope), request_id))

        async def answer(call: Call, _: bytes) -> None:
            await parts.caller.resume(call, request_id)

        return CallResponse(answer, parts.limits, parts.metrics, parts.traces)

    @router.post("/v1/requests/{request_id}/cancel")
    async def cancel(request: Request, request_id: str) -> Response:
        await parts.caller.cancel(identity_of(request.scope), request_id)
        return json_response({"id": request_id, "object": "request", "status": "cancelling"})

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        identity = identity_of(request.scope)
        data = [_model_object(model.card) for model in parts.models.all() if identity.may_ask(model.card.model)]
        data += [_startable_object(name) for name in parts.models.startable() if identity.may_ask(name)]
        return json_response({"object": "list", "data": data})

    @router.get("/v1/models/{name:path}")
    async def show_model(request: Request, name: str) -> Response:
        identity_of(request.scope).check_model(name)
        return json_response(_model_object(parts.models.get(name).card))

    @router.post("/tokenize", openapi_extra=_takes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeBody, await _body(request))
        identity_of(request.scope).check_model(body.model)
        model = parts.models.get(body.model)
        check_length(model, len(body.prompt), None, "prompt")
        special = body.add_special_tokens is not False
        ids = await parts.pool.run(lambda: model.encoder.encode(body.prompt, add_special_tokens=special))
        return json_response({"count": len(ids), "max_model_len": model.card.context, "tokens": ids})

    @router.post("/detokenize", openapi_extra=_takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeBody, await _body(request))
        identity_of(request.scope).check_model(body.model)
        model = parts.models.get(body.model)
        return json_response({"prompt": await parts.pool.run(lambda: model.encoder.decode(body.tokens))})

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        reason = parts.not_ready()
        num_workers = parts.models.num_ready_workers()
        if reason is not None:
            return json_response({"status": "not_ready", "reason": reason, "workers": num_workers}, 503)
        return json_response({"status": "ready", "workers": num_workers})

    @router.head("/live", include_in_schema=False)
    @router.get("/live")
    async def live() -> Response:
        return json_response({"status": "alive"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(parts.metrics.render(), headers={"content-type": METRICS_CONTENT_TYPE})

    @router.get("/load")
    async def load() -> Response:
        """How many calls this router is answering."""
        return json_response({"server_load": parts.caller.num_active})

    @router.get("/version")
    async def show_version() -> Response:
        return json_response({"version": _version()})

    async def _body(request: Request) -> bytes:
        return await read_json_body(request.headers, request.receive, parts.limits.body)

    return router


def _model_object(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.model,
        "object": "model",
        "created": card.created,
        "owned_by": "headrace",
        "root": card.model,
        "parent": None,
        "max_model_len": card.context,
        "permission": [],
    }


def _startable_object(name: str) -> dict[str, object]:
    """Of a model that has had no worker yet."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "headrace", "root": name, "parent": None}


def _takes(kind: type, headers: Mapping[str, str] | None = None) -> dict[str, object]:
    """The handlers read bodies and headers themselves; this is for the OpenAPI document."""
    schema = {"$ref": SCHEMA_REF.format(model=kind.__name__)}
    body: dict[str, object] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body, **_hears(headers or {})}


def _hears(headers: Mapping[str, str]) -> dict[str, object]:
    parameters: list[object] = [
        {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in headers.items()
    ]
    return {"parameters": parameters}


def _version() -> str:
    try:
        return version("headrace-router")
    except PackageNotFoundError:
        return "unknown"
