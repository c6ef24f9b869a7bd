"""Paths to handlers. No logic."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from fastapi import APIRouter, Request
from msgspec import Struct
from pydantic import BaseModel
from starlette.responses import Response

from headrace_router.adapter_admin import AdapterAdmin
from headrace_router.adapter_routes import make_adapter_router
from headrace_router.answer_schemas import (
    Alive,
    Cancelling,
    ChatCompletion,
    Health,
    ModelList,
    ModelObject,
    RequestStatus,
    ServerLoad,
    TextCompletion,
    Version,
)
from headrace_router.authentication import Door, identity_of
from headrace_router.bodies import Body, receive_json
from headrace_router.browser_guard import Guard
from headrace_router.call import Call
from headrace_router.call_options import HEADERS, IDEMPOTENCY_KEY, LANE, LAST_EVENT_ID, TIMEOUT
from headrace_router.call_response import Answer, CallResponse, ClientLimits
from headrace_router.call_trace import CallTraces
from headrace_router.calls import Caller
from headrace_router.dashboard.pages import Dashboard
from headrace_router.embedding_form import EmbeddingList
from headrace_router.http_errors import json_response
from headrace_router.messages_api.routes import add_messages_routes
from headrace_router.messages_api.service import MessagesService
from headrace_router.metrics import RouterMetrics
from headrace_router.models import Models, ServedModel
from headrace_router.openapi import EVENTS, JSON, OF_CALLS, operation
from headrace_router.preparation import Preparer
from headrace_router.prompt_routes import make_prompt_router
from headrace_router.responses_api.routes import ResponsesParts, add_responses_routes
from headrace_router.schemas import ChatBody, CompletionBody, EmbeddingBody
from headrace_shared.telemetry import METRICS_CONTENT_TYPE

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
STREAMED = (JSON, EVENTS)
ANY_ANSWER = (ChatCompletion, TextCompletion, EmbeddingList, RequestStatus)
DEFAULT_PARAMETERS = ("temperature", "top_p", "top_k", "repetition_penalty")
"""What a model's card may say of sampling."""


class Parts(NamedTuple):
    """What the handlers need."""

    caller: Caller
    models: Models
    preparer: Preparer
    metrics: RouterMetrics
    limits: ClientLimits
    not_ready: Callable[[], str | None]
    door: Door
    responses: ResponsesParts
    messages: MessagesService
    adapters: AdapterAdmin
    guard: Guard
    dashboard: Dashboard | None = None
    """None: switched off."""
    traces: CallTraces | None = None
    """None: nothing is traced."""
    more: Sequence[APIRouter] = ()
    """Further routes."""


def answer_of(parts: Parts, answer: Answer) -> Response:
    return CallResponse(answer, parts.limits, parts.metrics, parts.traces)


def straight_calls(parts: Parts) -> dict[str, Callable[[], Response]]:
    """Of the routes below that generate text: what answers one call."""
    answers: dict[str, Answer] = {CHAT_PATH: parts.caller.chat, COMPLETION_PATH: parts.caller.completion}
    return {path: partial(answer_of, parts, answer) for path, answer in answers.items()}


def make_router(parts: Parts) -> APIRouter:
    router = APIRouter()

    @router.post(CHAT_PATH, openapi_extra=_call(ChatBody, ChatCompletion))
    async def chat_completions() -> Response:
        return answer_of(parts, parts.caller.chat)

    @router.post(COMPLETION_PATH, openapi_extra=_call(CompletionBody, TextCompletion))
    async def completions() -> Response:
        return answer_of(parts, parts.caller.completion)

    heeded = {name: HEADERS[name] for name in (IDEMPOTENCY_KEY, TIMEOUT, LANE)}
    described = operation(EmbeddingList, body=EmbeddingBody, headers=heeded, errors=OF_CALLS)

    @router.post("/v1/embeddings", openapi_extra=described)
    async def embeddings() -> Response:
        """The mean of the model's last hidden states over the tokens of each input, of length 1."""
        return answer_of(parts, parts.caller.embedding)

    heard = {LAST_EVENT_ID: HEADERS[LAST_EVENT_ID]}

    @router.get(
        "/v1/requests/{request_id}",
        openapi_extra=operation(ANY_ANSWER, media=STREAMED, headers=heard, errors=(400, 403, 404, 408, 410, 429, 503)),
    )
    async def resume(request: Request, request_id: str, wait: bool = True) -> Response:
        """The answer to a call that may be resumed, from behind the header Last-Event-ID. `wait=false`: only what has
        become of it so far: its place in the queue and the expected wait, say."""
        if not wait:
            return json_response(await parts.caller.status(identity_of(request.scope), request_id))

        async def answer(call: Call, _: Body) -> None:
            await parts.caller.resume(call, request_id)

        return answer_of(parts, answer)

    @router.post("/v1/requests/{request_id}/cancel", openapi_extra=operation(Cancelling, errors=(404, 503)))
    async def cancel(request: Request, request_id: str) -> Response:
        """Ends a call that may be resumed. Tells `cancelling`, or how the call had ended before."""
        status = await parts.caller.cancel(identity_of(request.scope), request_id)
        return json_response({"id": request_id, "object": "request", "status": status})

    @router.head("/v1/models", openapi_extra=operation(ModelList))
    @router.get("/v1/models", openapi_extra=operation(ModelList))
    async def list_models(request: Request) -> Response:
        identity = identity_of(request.scope)
        models = [*parts.models.all(), *parts.models.with_adapters()]
        data = [_model_object(model) for model in models if identity.may_ask(model.name)]
        data += [_startable_object(name) for name in parts.models.startable() if identity.may_ask(name)]
        return json_response({"object": "list", "data": data})

    @router.head("/v1/models/{name:path}", openapi_extra=operation(ModelObject, errors=(403, 404, 503)))
    @router.get("/v1/models/{name:path}", openapi_extra=operation(ModelObject, errors=(403, 404, 503)))
    async def show_model(request: Request, name: str) -> Response:
        identity_of(request.scope).check_model(name)
        if name in parts.models.startable():
            return json_response(_startable_object(name))
        return json_response(_model_object(parts.models.get(name)))

    healths = {"200": ("Ready.", Health), "503": ("Not ready, or draining.", Health)}

    @router.head("/health", openapi_extra=operation(healths, is_open=True))
    @router.get("/health", openapi_extra=operation(healths, is_open=True))
    async def health() -> Response:
        reason = parts.not_ready()
        num_workers = parts.models.num_ready_workers()
        if reason is not None:
            return json_response({"status": "not_ready", "reason": reason, "workers": num_workers}, 503)
        return json_response({"status": "ready", "workers": num_workers})

    @router.head("/live", openapi_extra=operation(Alive, is_open=True))
    @router.get("/live", openapi_extra=operation(Alive, is_open=True))
    async def live() -> Response:
        return json_response({"status": "alive"})

    exposition = operation(None, media=(METRICS_CONTENT_TYPE.split(";")[0],))

    @router.head("/metrics", openapi_extra=exposition)
    @router.get("/metrics", openapi_extra=exposition)
    async def metrics() -> Response:
        return Response(parts.metrics.render(), headers={"content-type": METRICS_CONTENT_TYPE})

    @router.head("/load", openapi_extra=operation(ServerLoad))
    @router.get("/load", openapi_extra=operation(ServerLoad))
    async def load() -> Response:
        """How many calls this router is answering."""
        return json_response({"server_load": parts.caller.num_active})

    @router.head("/version", openapi_extra=operation(Version))
    @router.get("/version", openapi_extra=operation(Version))
    async def show_version() -> Response:
        return json_response({"version": _version()})

    router.include_router(make_prompt_router(parts))
    router.include_router(make_adapter_router(parts))

    respond = partial(answer_of, parts)

    async def read(request: Request) -> Body:
        return await receive_json(request.headers, request.receive, parts.limits.body)

    add_responses_routes(router, lambda: parts.responses, respond, read)
    add_messages_routes(router, lambda: parts.messages, respond, read)
    return router


def _model_object(model: ServedModel) -> dict[str, object]:
    card = model.card
    defaults = {name: getattr(card, name) for name in DEFAULT_PARAMETERS}
    return {
        "id": model.name,
        "object": "model",
        "created": card.created,
        "owned_by": "headrace",
        "root": card.model,
        "parent": None if model.adapter is None else card.model,
        "max_model_len": card.context,
        "default_parameters": {name: value for name, value in defaults.items() if value is not None},
        "permission": [],
    }


def _startable_object(name: str) -> dict[str, object]:
    """Of a model that has had no worker yet."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "headrace", "root": name, "parent": None}


def _call(kind: type[BaseModel], answer: type[Struct]) -> dict[str, object]:
    return operation(answer, body=kind, media=STREAMED, headers=HEADERS, errors=OF_CALLS)


def _version() -> str:
    try:
        return version("headrace-router")
    except PackageNotFoundError:
        return "unknown"
