"""The API's description, OpenAPI 3.1. Handlers read bodies and write answers themselves, so FastAPI sees neither: each
route says by `operation(…)` what it takes and gives, and `describe` makes a document of all that.

A body is a schema of `schemas.py` listed in `BODIES`, an answer a struct listed in `ANSWERS`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from headrace_router.answer_schemas import (
    Alive,
    Cancelling,
    ChatCompletion,
    Detokenized,
    ErrorBody,
    Health,
    ModelList,
    ModelObject,
    Rendered,
    RequestStatus,
    ServerLoad,
    TextCompletion,
    Tokenized,
    Version,
)
from headrace_router.batches.answers import BatchList, BatchObject
from headrace_router.batches.schemas import BatchBody
from headrace_router.call_options import HEADER_SCHEMAS
from headrace_router.embedding_form import EmbeddingList
from headrace_router.files.answers import FileDeleted, FileList, FileObject
from headrace_router.messages_api.answer_schemas import MessageError, MessageObject, TokenCount
from headrace_router.messages_api.schemas import CountTokensBody, MessagesBody
from headrace_router.responses_api.answer_schemas import DeletedResponse, InputItems, InputTokens, ResponseObject
from headrace_router.responses_api.schemas import InputTokensBody, ResponsesBody
from headrace_router.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)

SCHEMA_REF = "#/components/schemas/{name}"
BODIES: tuple[type[BaseModel], ...] = (
    *(ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, BatchBody),
    *(ResponsesBody, InputTokensBody, MessagesBody, CountTokensBody),
    *(EmbeddingBody, LoadAdapterBody, UnloadAdapterBody),
)
ANSWERS: tuple[type[msgspec.Struct], ...] = (
    *(
        ChatCompletion,
        TextCompletion,
        EmbeddingList,
        Rendered,
        Tokenized,
        Detokenized,
        ModelList,
        ModelObject,
        RequestStatus,
        Cancelling,
    ),
    *(FileObject, FileList, FileDeleted, BatchObject, BatchList),
    *(Health, Alive, ServerLoad, Version, ErrorBody),
    *(ResponseObject, DeletedResponse, InputItems, InputTokens),
    *(MessageObject, TokenCount, MessageError),
)

JSON = "application/json"
EVENTS = "text/event-stream"
HTML = "text/html"

ERRORS = {
    400: "The request is not valid; `param` names the field.",
    401: "No key, or one that nobody knows.",
    403: "The key may not do this.",
    404: "There is no such thing: a model, a request, a path.",
    405: "Not with this method.",
    408: "It took too long: the body to come, or the answer within its time.",
    409: "The Idempotency-Key is being used right now; or it cannot be done in the state that the thing is in.",
    410: "The answer is not kept any more.",
    413: "The body, or the prompt with its answer, is too large.",
    415: "The body is no JSON, or compressed.",
    422: "The Idempotency-Key was used with another body.",
    429: "Too much was asked for: come back after `retry-after` seconds.",
    431: "The headers are too large.",
    500: "The server is at fault.",
    504: "It took too long.",
    503: "Not now: come back after `retry-after` seconds.",
    529: "Overloaded: come back after `retry-after` seconds.",
}
OF_BODIES = (400, 403, 404, 408, 413, 415, 429, 503)
"""Of routes that take a body and name a model."""
OF_CALLS = (*OF_BODIES, 409, 410, 422, 529)
OF_ALL = (401, 405, 431, 500)
_ANSWERS_KEY = "x-answers"


def operation(
    answer: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | Mapping[str, Any] | None,
    *,
    body: type[BaseModel] | None = None,
    media: Iterable[str] = (JSON,),
    headers: Mapping[str, str] | None = None,
    query: Mapping[str, Mapping[str, Any]] | None = None,
    errors: Iterable[int] = (),
    is_open: bool = False,
    is_list: bool = False,
    error: type[msgspec.Struct] = ErrorBody,
) -> dict[str, Any]:
    """For `openapi_extra` of a route. `answer`: of status 200 (one of several), or of each status with a text; None: no
    JSON. `headers` that it listens to, with what they are for; `query`: parameters with their schemas. `is_open`: no
    key is needed. `is_list`: the answer is a list of these. `error`: the shape of errors."""
    content: dict[str, Any] = {kind: {"schema": _schema(answer, kind, is_list=is_list)} for kind in media}
    answers: dict[str, Any] = {"200": {"description": "As asked for.", "content": content}}
    if isinstance(answer, Mapping):
        answers = {
            status: {"description": text, "content": {JSON: {"schema": _ref(kind)}}}
            for status, (text, kind) in answer.items()
        }
    wanted = {*errors, *(OF_ALL if not is_open else (405, 431, 500))}
    for status in sorted(wanted):
        answers.setdefault(str(status), _error(status, error))
    described: dict[str, Any] = {_ANSWERS_KEY: answers, "security": [] if is_open else [{"bearer": []}, {"apiKey": []}]}
    if headers:
        described["parameters"] = [
            {
                "name": name,
                "in": "header",
                "required": False,
                "description": text,
                "schema": HEADER_SCHEMAS.get(name, {"type": "string"}),
            }
            for name, text in headers.items()
        ]
    if query:
        described.setdefault("parameters", []).extend(
            {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in query.items()
        )
    if body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": _ref(body)}}}
    return described


def describe(document: dict[str, Any]) -> None:
    """Completes FastAPI's own document, in place."""
    document["info"]["description"] = (
        "LLM inference behind OpenAI's API, with the extensions of other open servers. Null means that a field is not "
        "given; unknown fields are accepted. Bounds that depend on the model (its context, its vocabulary) are not "
        "written here: what is beyond them gets 400."
    )
    components = document.setdefault("components", {})
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    pydantic_ref = SCHEMA_REF.format(name="{model}")
    _, bodies = models_json_schema([(body, "validation") for body in BODIES], ref_template=pydantic_ref)
    _, answers = msgspec.json.schema_components(ANSWERS, ref_template=SCHEMA_REF)
    components["schemas"] = {**components.get("schemas", {}), **bodies["$defs"], **answers}
    for path in document["paths"].values():
        for described in path.values():
            described["responses"] = described.pop(_ANSWERS_KEY, described["responses"])


def _error(status: int, shape: type[msgspec.Struct]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "description": ERRORS[status],
        "content": {JSON: {"schema": _ref(shape)}},
    }
    if status in (429, 503, 529):
        described["headers"] = {
            "retry-after": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
        }
    return described


def _schema(answer: Any, media: str, *, is_list: bool) -> dict[str, Any]:
    if media != JSON or answer is None or isinstance(answer, Mapping):
        return {"type": "string"}
    if isinstance(answer, tuple):
        return {"anyOf": [_ref(kind) for kind in answer]}
    return {"type": "array", "items": _ref(answer)} if is_list else _ref(answer)


def _ref(kind: type) -> dict[str, Any]:
    return {"$ref": SCHEMA_REF.format(name=kind.__name__)}
