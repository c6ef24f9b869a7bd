"""/v1/batches: paths to handlers. No logic."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace_router.authentication import identity_of
from headrace_router.batches.answers import BatchList, BatchObject, batch_object
from headrace_router.batches.desk import BatchDesk
from headrace_router.batches.schemas import BatchBody
from headrace_router.bodies import BodyLimits, read_json_body
from headrace_router.call_options import HEADERS, IDEMPOTENCY_KEY, read_options
from headrace_router.http_errors import json_response
from headrace_router.openapi import operation
from headrace_router.paging import page, query_schemas, read_query
from headrace_router.parsing import parse_body

MAX_LISTED = 100
DEFAULT_LISTED = 20
MAX_BODY_BYTES = 64 * 1024

CREATE = operation(
    BatchObject,
    body=BatchBody,
    headers={IDEMPOTENCY_KEY: HEADERS[IDEMPOTENCY_KEY]},
    errors=(400, 403, 404, 408, 413, 415, 422, 429, 503),
)
LIST = operation(BatchList, query=query_schemas(DEFAULT_LISTED, MAX_LISTED), errors=(400, 503))


def make_batches_router(desk: BatchDesk, body_timeout_s: float) -> APIRouter:
    router = APIRouter()
    limits = BodyLimits(MAX_BODY_BYTES, body_timeout_s)

    @router.post("/v1/batches", openapi_extra=CREATE)
    async def create_batch(request: Request) -> Response:
        body = parse_body(BatchBody, await read_json_body(request.headers, request.receive, limits))
        options = read_options(request.headers)
        record = await desk.create(identity_of(request.scope), body, options.idempotency_key)
        return json_response(batch_object(record))

    @router.get("/v1/batches", openapi_extra=LIST)
    async def list_batches(request: Request) -> Response:
        query = read_query(request.query_params, DEFAULT_LISTED, MAX_LISTED)
        records = await desk.all_of(identity_of(request.scope))
        return json_response(page(records, query, lambda record: record.batch_id, batch_object))

    @router.get("/v1/batches/{batch_id}", openapi_extra=operation(BatchObject, errors=(404, 503)))
    async def show_batch(request: Request, batch_id: str) -> Response:
        return json_response(batch_object(await desk.get(identity_of(request.scope), batch_id)))

    @router.post("/v1/batches/{batch_id}/cancel", openapi_extra=operation(BatchObject, errors=(404, 409, 503)))
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        return json_response(batch_object(await desk.cancel(identity_of(request.scope), batch_id)))

    return router
