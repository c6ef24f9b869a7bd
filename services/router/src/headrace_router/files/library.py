"""The files of all tenants: descriptions in a bucket, content in the object store of the same name.

A description is written before the first byte of content and removed after the last, so that whatever is stored has
one, and whoever dies on the way leaves something that `sweep` finds.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Collection
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from headrace_router.files.filename import safe_filename
from headrace_router.files.record import (
    Counted,
    FileRecord,
    FileState,
    Quota,
    check_file_id,
    file_not_found,
    room_of,
)
from headrace_shared.bus import Bus, Entry
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, InvalidRequest, ProtocolError, RevisionConflict
from headrace_shared.objects import ObjectInfo, ObjectStore, ObjectWriter
from headrace_shared.patience import patiently
from headrace_shared.subjects import FILE_CONTENT, FILES

log = structlog.get_logger(__name__)

OUTPUT_PURPOSE = "batch_output"
MAX_LOOKS = 5
LAG_S = 0.2
"""A broker of a cluster may answer before it knows what another one has stored."""
UPLOAD_ROOM_S = 60.0
"""An upload that has taken so much longer than it may is nobody's any more."""


class FileLimits(NamedTuple):
    quota: Quota
    max_bytes: int
    """Of one file."""
    upload_timeout_s: float


class StoredFile(NamedTuple):
    record: FileRecord
    info: ObjectInfo


class FileLibrary:
    def __init__(self, bus: Bus, limits: FileLimits, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._bus = bus
        self._objects = ObjectStore(bus, FILE_CONTENT)
        self._clock = clock
        self.limits = limits

    async def open(self) -> None:
        """Raises BusError."""
        await self._bus.ensure_bucket(FILES)
        await self._objects.open()

    # Storing.

    async def begin(self, owner: str, filename: str, least: int, most: int) -> "Draft":
        """`owner`: its token. So many bytes at least and at most are to be expected; until the true number is known the
        most counts, so that the quota holds whoever else is storing files. Raises Forbidden if the owner has no room,
        InvalidRequest (413), BusError."""
        draft = await self._create(owner, safe_filename(filename), "", most, self.limits.upload_timeout_s)
        try:
            room = room_of(draft.revision, await self._counted(owner), self.limits.quota)
            if least > room:
                raise room_exceeded(room)
            draft.room = min(self.limits.max_bytes, room, most)
        except BaseException:
            await self.abandon(draft)
            raise
        return draft

    async def check_room(self, owner: str) -> None:
        """For results that are to come. Raises Forbidden, BusError."""
        room_of(None, await self._counted(owner), self.limits.quota)

    async def begin_output(self, owner: str, file_id: str, filename: str, timeout_s: float) -> "Draft":
        """For results, which are kept whatever the quota says; they count all the same. Raises BusError."""
        return await self._create(owner, filename, OUTPUT_PURPOSE, 0, timeout_s, file_id)

    async def finish(self, draft: "Draft", purpose: str, life_s: int) -> FileRecord:
        """From now on the file is there. Raises BusError, and RevisionConflict if it was given up meanwhile."""
        info = await draft.writer.finish()
        record = replace(
            draft.record,
            purpose=purpose,
            size=info.size,
            expires_at=int(draft.record.created_at) + life_s,
            state=FileState.READY,
        )
        key = _key(record)
        try:
            await patiently(lambda: self._bus.update(FILES.name, key, encode(record), draft.revision))
        except RevisionConflict:
            # Our own write, whose answer was lost, looks the same.
            entry = await self._bus.get(FILES.name, key)
            if entry is None or entry.value != encode(record):
                raise
        return record

    async def abandon(self, draft: "Draft") -> None:
        """Nothing is left of it, unless the broker is away: then `sweep` sees to it."""
        await self._drop(draft.record, draft.revision)

    # Looking.

    async def find(self, owner: str, file_id: str) -> FileRecord:
        """Raises InvalidRequest (404), BusError."""
        return (await self._find(owner, file_id)).record

    async def all_of(self, owner: str) -> list[FileRecord]:
        """Oldest first. Raises BusError."""
        now = self._clock()
        records = [counted.record for counted in await self._counted(owner)]
        return sorted(
            (record for record in records if record.is_visible(now)),
            key=lambda record: (record.created_at, record.file_id),
        )

    async def stored(self, owner: str, file_id: str, *, is_in_use: bool = False) -> StoredFile:
        """`is_in_use`: also one that has expired, while `sweep` spares it. Raises InvalidRequest (404), BusError."""
        record = (await self._find(owner, file_id, even_expired=is_in_use)).record
        for _ in range(MAX_LOOKS):
            info = await self._objects.info(file_id)
            if info is not None:
                return StoredFile(record, info)
            await asyncio.sleep(LAG_S)
        raise file_not_found(file_id)

    def content(self, stored: StoredFile) -> AsyncGenerator[bytes, None]:
        """Raises ObjectDamaged instead of giving out the last piece of what is not as it was; BusError."""
        return self._objects.pieces(stored.info)

    # Deleting.

    async def delete(self, owner: str, file_id: str) -> None:
        """Raises InvalidRequest (404), BusError."""
        found = await self._find(owner, file_id)
        marked = replace(found.record, state=FileState.DELETING)
        try:
            revision = await self._bus.update(FILES.name, _key(marked), encode(marked), found.revision)
        except RevisionConflict:
            raise file_not_found(file_id) from None  # somebody else is deleting it
        await self._erase(marked, revision)

    async def discard(self, owner: str, file_id: str) -> None:
        """In whatever state it is. No error if there is none. Raises BusError."""
        entry = await self._bus.get(FILES.name, f"{owner}.{file_id}")
        record = None if entry is None else _decoded(entry)
        if entry is not None and record is not None:
            await self._erase(record, entry.revision)

    async def sweep(self, in_use: Collection[str]) -> int:
        """Deletes what has expired, but for files that are in use, and what was never completed; returns how many.
        Raises BusError."""
        now, num_swept = self._clock(), 0
        for entry in await self._bus.entries(FILES.name):
            record = _decoded(entry)
            if record is None or not record.is_garbage(now) or record.file_id in in_use:
                continue
            try:
                await self._erase(record, entry.revision)
                num_swept += 1
            except RevisionConflict:
                log.debug("somebody else tidies up", file_id=record.file_id)
        return num_swept

    async def _create(
        self, owner: str, filename: str, purpose: str, num_bytes: int, timeout_s: float, file_id: str = ""
    ) -> "Draft":
        now = self._clock()
        record = FileRecord(
            file_id=file_id or new_file_id(),
            owner=owner,
            filename=filename,
            purpose=purpose,
            size=num_bytes,
            created_at=now,
            expires_at=int(now) + 10**9,
            state=FileState.UPLOADING,
            give_up_at=int(now + timeout_s + UPLOAD_ROOM_S),
        )
        revision = await self._bus.create(FILES.name, _key(record), encode(record))
        return Draft(record, revision, self._objects.writer(record.file_id), self.limits.max_bytes)

    async def _find(self, owner: str, file_id: str, *, even_expired: bool = False) -> Counted:
        entry = await self._bus.get(FILES.name, f"{owner}.{check_file_id(file_id)}")
        record = None if entry is None else _decoded(entry)
        now = float("-inf") if even_expired else self._clock()
        if entry is None or record is None or not record.is_visible(now):
            raise file_not_found(file_id)
        return Counted(record, entry.revision)

    async def _counted(self, owner: str) -> list[Counted]:
        now = self._clock()
        entries = [(entry.revision, _decoded(entry)) for entry in await self._bus.entries(FILES.name, owner)]
        return [Counted(record, revision) for revision, record in entries if record and not record.is_garbage(now)]

    async def _drop(self, record: FileRecord, revision: int) -> None:
        try:
            await self._erase(record, revision)
        except BusError as error:
            log.info("file not deleted yet", file_id=record.file_id, error=str(error))

    async def _erase(self, record: FileRecord, revision: int) -> None:
        """Content first: what has no description would never be found."""
        await self._objects.delete(record.file_id)
        await self._bus.remove(FILES.name, _key(record), revision)


class Draft:
    """A file that is being stored."""

    def __init__(self, record: FileRecord, revision: int, writer: ObjectWriter, room: int) -> None:
        self.record = record
        self.revision = revision
        self.writer = writer
        self.room = room
        """Bytes."""

    async def write(self, data: bytes) -> None:
        """Raises InvalidRequest (413), QueueFull if the store is full, BusError."""
        if self.writer.size + len(data) > self.room:
            raise room_exceeded(self.room)
        await self.writer.write(data)


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def room_exceeded(room: int) -> InvalidRequest:
    return InvalidRequest(f"The file exceeds {room} bytes.", param="file", code="payload_too_large")


def _key(record: FileRecord) -> str:
    return f"{record.owner}.{record.file_id}"


def _decoded(entry: Entry) -> FileRecord | None:
    try:
        return decode(entry.value, FileRecord)
    except ProtocolError as error:
        log.warning("undecodable description of a file", key=entry.key, error=str(error))
        return None
