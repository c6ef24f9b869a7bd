"""/v1/files: paths to handlers. No logic."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing

import structlog
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from headrace_router.authentication import identity_of
from headrace_router.files.answers import FileDeleted, FileList, FileObject
from headrace_router.files.filename import content_disposition
from headrace_router.files.library import FileLibrary, StoredFile
from headrace_router.files.record import LONGEST_LIFE_S, SHORTEST_LIFE_S, file_object
from headrace_router.files.transfers import Transfers
from headrace_router.files.uploading import Uploads
from headrace_router.http_errors import json_response
from headrace_router.identity import Identity
from headrace_router.openapi import operation
from headrace_router.owners import owner_token
from headrace_router.paging import page, query_schemas, read_query

MAX_LISTED = 10_000
DEFAULT_LISTED = 1000
MAX_DOWNLOADS = 256
"""At once, of all callers."""
MAX_DOWNLOADS_OF_ONE = 32
SEND_TIMEOUT_S = 60.0

log = structlog.get_logger(__name__)

OCTETS = "application/octet-stream"
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": SHORTEST_LIFE_S, "maximum": LONGEST_LIFE_S},
    },
}
CREATE = {
    **operation(FileObject, errors=(400, 403, 408, 413, 415, 429, 503)),
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}},
}
LIST = operation(
    FileList,
    query={**query_schemas(DEFAULT_LISTED, MAX_LISTED), "purpose": {"type": "string"}},
    errors=(400, 503),
)


def make_files_router(
    library: FileLibrary, uploads: Uploads, check_unused: Callable[[Identity, str], Awaitable[None]]
) -> APIRouter:
    """`check_unused` raises if a file must not be deleted."""
    router = APIRouter()
    downloads = Transfers(MAX_DOWNLOADS, MAX_DOWNLOADS_OF_ONE)

    @router.post("/v1/files", openapi_extra=CREATE)
    async def create_file(request: Request) -> Response:
        record = await uploads.receive(_owner(request), _caller(request), request.headers, request.receive)
        return json_response(file_object(record))

    @router.get("/v1/files", openapi_extra=LIST)
    async def list_files(request: Request) -> Response:
        query = read_query(request.query_params, DEFAULT_LISTED, MAX_LISTED)
        purpose = request.query_params.get("purpose")
        files = [
            file for file in reversed(await library.all_of(_owner(request))) if purpose in (None, "", file.purpose)
        ]
        return json_response(page(files, query, lambda file: file.file_id, file_object))

    @router.get("/v1/files/{file_id}", openapi_extra=operation(FileObject, errors=(404, 503)))
    async def show_file(request: Request, file_id: str) -> Response:
        return json_response(file_object(await library.find(_owner(request), file_id)))

    @router.get("/v1/files/{file_id}/content", openapi_extra=operation(None, media=(OCTETS,), errors=(404, 503)))
    async def file_content(request: Request, file_id: str) -> Response:
        stored = await library.stored(_owner(request), file_id)
        headers = {
            "content-length": str(stored.info.size),
            "content-disposition": content_disposition(stored.record.filename),
            # What a client has stored must not become a page of ours.
            "x-content-type-options": "nosniff",
        }
        return _Download(downloads.one(stored.record.owner), _content(library, stored), headers)

    @router.delete("/v1/files/{file_id}", openapi_extra=operation(FileDeleted, errors=(404, 409, 503)))
    async def delete_file(request: Request, file_id: str) -> Response:
        await library.find(_owner(request), file_id)
        await check_unused(identity_of(request.scope), file_id)
        await library.delete(_owner(request), file_id)
        return json_response(FileDeleted(id=file_id))

    return router


class _Slow(Exception):
    """The client takes too little."""


class _Download(StreamingResponse):
    """Counted as long as it lasts; cut off where the client takes a piece (128 KiB) not within SEND_TIMEOUT_S."""

    def __init__(
        self, place: AbstractContextManager[None], content: AsyncIterator[bytes], headers: dict[str, str]
    ) -> None:
        super().__init__(content, headers=headers, media_type=OCTETS)
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send(message)
            except TimeoutError:
                raise _Slow from None

        with self._place:
            try:
                await super().__call__(scope, receive, send_in_time)
            except _Slow:
                # Returning before the end of the body makes the server close the connection: no clean end.
                log.warning("download is too slow; cut off")


async def _content(library: FileLibrary, stored: StoredFile) -> AsyncIterator[bytes]:
    """Ends too early, so that the connection breaks, where the content is not what was stored."""
    async with aclosing(library.content(stored)) as pieces:
        async for piece in pieces:
            yield piece


def _owner(request: Request) -> str:
    return owner_token(identity_of(request.scope).owner)


def _caller(request: Request) -> str:
    """Where no keys are required, a client may call itself whatever it likes, but has few addresses."""
    if identity_of(request.scope).key is None and request.client is not None:
        return request.client.host
    return _owner(request)
