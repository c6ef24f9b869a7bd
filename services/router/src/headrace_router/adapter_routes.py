"""Loading and unloading of LoRA adapters."""

from typing import Protocol

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from headrace_router.adapter_admin import AdapterAdmin
from headrace_router.authentication import identity_of
from headrace_router.bodies import read_json_body
from headrace_router.call_response import ClientLimits
from headrace_router.openapi import OF_BODIES, operation
from headrace_router.parsing import parse_body
from headrace_router.schemas import LoadAdapterBody, UnloadAdapterBody

TEXT = "text/plain"


class AdapterParts(Protocol):
    """What the handlers need."""

    @property
    def adapters(self) -> AdapterAdmin: ...

    @property
    def limits(self) -> ClientLimits: ...


def make_adapter_router(parts: AdapterParts) -> APIRouter:
    router = APIRouter()

    async def read(request: Request) -> bytes:
        return await read_json_body(request.headers, request.receive, parts.limits.body)

    @router.post(
        "/v1/load_lora_adapter", openapi_extra=operation(None, media=(TEXT,), body=LoadAdapterBody, errors=OF_BODIES)
    )
    async def load_adapter(request: Request) -> Response:
        """Every worker of the model loads the adapter, which can then be asked for by name. Needs an administrator's
        key."""
        identity = identity_of(request.scope)
        parts.adapters.check(identity)
        return PlainTextResponse(await parts.adapters.load(identity, parse_body(LoadAdapterBody, await read(request))))

    @router.post(
        "/v1/unload_lora_adapter",
        openapi_extra=operation(None, media=(TEXT,), body=UnloadAdapterBody, errors=OF_BODIES),
    )
    async def unload_adapter(request: Request) -> Response:
        """Nobody can ask for it any more; requests that run with it finish. Needs an administrator's key."""
        identity = identity_of(request.scope)
        parts.adapters.check(identity)
        return PlainTextResponse(
            await parts.adapters.unload(identity, parse_body(UnloadAdapterBody, await read(request)))
        )

    return router
