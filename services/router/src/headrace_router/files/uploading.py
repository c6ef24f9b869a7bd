"""A request body in multipart form to a stored file, piece by piece."""

import asyncio
from collections.abc import AsyncIterator

import structlog
from starlette.datastructures import Headers
from starlette.types import Receive

from headrace_router.bodies import GRACE_S, MIN_BYTES_PER_S, ClientGone
from headrace_router.files.library import Draft, FileLibrary
from headrace_router.files.multipart import Event, MultipartParser, PartBegin, PartData, PartEnd, boundary_of
from headrace_router.files.record import FileRecord, life_s
from headrace_router.files.transfers import Transfers
from headrace_shared.errors import InvalidRequest, Overloaded, ProtocolError, QueueFull

log = structlog.get_logger(__name__)

MAX_UPLOADS = 64
"""At once, of all callers."""
MAX_UPLOADS_OF_ONE = 8
MAX_FIELD_BYTES = 1024
ROOM_FOR_FORM = 64 * 1024
"""What a body may have beside the file: boundaries, heads, fields."""
NO_ROOM_S = 60.0
PURPOSES = frozenset({"batch"})


class Uploads:
    def __init__(self, library: FileLibrary, silence_s: float) -> None:
        """A client that sends nothing for `silence_s`, or less than MIN_BYTES_PER_S, is given up."""
        self._library = library
        self._silence_s = silence_s
        self._transfers = Transfers(MAX_UPLOADS, MAX_UPLOADS_OF_ONE)

    async def receive(self, owner: str, caller: str, headers: Headers, receive: Receive) -> FileRecord:
        """`caller`: who is counted. Raises RequestError, BusError or ClientGone; then nothing is stored."""
        boundary = boundary_of(headers.get("content-type", ""))
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("Compressed bodies are not supported.", code="unsupported_media_type")
        limits = self._library.limits
        most = limits.max_bytes + ROOM_FOR_FORM
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > most:
            raise _too_large(limits.max_bytes)
        form = _Form(self._library, owner, int(declared) if declared.isdigit() else None)
        with self._transfers.one(caller):
            try:
                async with asyncio.timeout(limits.upload_timeout_s):
                    return await self._read(form, MultipartParser(boundary), _body(receive, most, self._silence_s))
            except TimeoutError:
                raise InvalidRequest("The file came too slowly.", code="body_timeout") from None
            except QueueFull:
                raise Overloaded("There is no room for files.", retry_after_s=NO_ROOM_S, code="files_full") from None
            finally:
                # Also when this router stops: what cannot be tidied up now is found later.
                await form.close()

    async def _read(self, form: "_Form", parser: MultipartParser, body: AsyncIterator[bytes]) -> FileRecord:
        async for data in body:
            for event in parser.feed(data):
                await form.take(event)
        if not parser.is_complete:
            raise InvalidRequest("The multipart body ends too early.", code="invalid_multipart")
        return await form.finish()


class _Form:
    """The fields of the form, and the file."""

    def __init__(self, library: FileLibrary, owner: str, num_bytes: int | None) -> None:
        """`num_bytes`: of the whole form; None if it is not known."""
        self._library = library
        self._owner = owner
        most = library.limits.max_bytes
        self._least = 0 if num_bytes is None else max(0, num_bytes - ROOM_FOR_FORM)
        self._most = most if num_bytes is None else min(most, num_bytes)
        self._fields: dict[str, str] = {}
        self._name = ""
        self._value: bytearray | None = None
        """Of the field that is being read; None: it is the file."""
        self._draft: Draft | None = None
        self._is_finished = False

    async def take(self, event: Event) -> None:
        match event:
            case PartBegin(name, None):
                if name in self._fields:
                    raise InvalidRequest(f"'{name}' is there twice.", param=name, code="invalid_multipart")
                self._name, self._value = name, bytearray()
            case PartBegin(name, filename):
                if name != "file" or self._draft is not None:
                    raise InvalidRequest("There must be one file, named 'file'.", param="file")
                self._check()
                self._draft = await self._library.begin(self._owner, filename or "", self._least, self._most)
            case PartData(data) if self._value is not None:
                if len(self._value) + len(data) > MAX_FIELD_BYTES:
                    raise InvalidRequest(f"'{self._name}' is too long.", param=self._name)
                self._value += data
            case PartData(data) if self._draft is not None:
                await self._draft.write(data)
            case PartEnd() if self._value is not None:
                try:
                    self._fields[self._name] = self._value.decode()
                except UnicodeDecodeError:
                    raise InvalidRequest(f"'{self._name}' is not UTF-8.", param=self._name) from None
                self._value = None
                self._check()

    async def finish(self) -> FileRecord:
        if self._draft is None:
            raise InvalidRequest("'file' is required.", param="file", code="missing_required_parameter")
        if "purpose" not in self._fields:
            raise InvalidRequest("'purpose' is required.", param="purpose", code="missing_required_parameter")
        self._check()
        record = await self._library.finish(self._draft, self._fields["purpose"], life_s(self._fields))
        self._is_finished = True
        return record

    async def close(self) -> None:
        if self._draft is not None and not self._is_finished:
            try:
                await self._library.abandon(self._draft)
            except ProtocolError as error:
                log.warning("upload not tidied up", file_id=self._draft.record.file_id, error=str(error))

    def _check(self) -> None:
        """Before the file is read, where the fields come first."""
        purpose = self._fields.get("purpose")
        if purpose is not None and purpose not in PURPOSES:
            raise InvalidRequest(f"'purpose' must be one of: {', '.join(sorted(PURPOSES))}.", param="purpose")


async def _body(receive: Receive, most: int, silence_s: float) -> AsyncIterator[bytes]:
    """Raises ClientGone, InvalidRequest."""
    size = 0
    waited_s = 0.0
    loop = asyncio.get_running_loop()
    while True:
        # Only what the client takes: the broker may be slow too. Who sends a byte now and then keeps a place of few.
        began_at = loop.time()
        async with asyncio.timeout(min(silence_s, GRACE_S + size / MIN_BYTES_PER_S - waited_s)):
            message = await receive()
        waited_s += loop.time() - began_at
        if message["type"] == "http.disconnect":
            raise ClientGone
        data = message.get("body", b"")
        size += len(data)
        if size > most:
            raise _too_large(most - ROOM_FOR_FORM)
        if data:
            yield data
        if not message.get("more_body", False):
            return


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(f"The file exceeds {limit} bytes.", param="file", code="payload_too_large")
