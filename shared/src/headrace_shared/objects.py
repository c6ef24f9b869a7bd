"""Objects of any size in the broker, in pieces, for whoever cannot have them in a message.

The layout is that of NATS' own object stores (ADR-20), so that `nats object ls|get|put` sees the same objects: pieces
in order on one subject, then a JSON description with their number and the digest of the whole. Narrower than NATS in
two points: a name is written once and never reused, so that its pieces can be found by the name alone, also where the
writer died before it could describe them; and deleting leaves no marker.

Nothing here holds more than READ_PIECES pieces at a time.
"""

import asyncio
import base64
import hashlib
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from headrace_shared.bus import Bus, Message
from headrace_shared.errors import BusError, BusRefused, ProtocolError
from headrace_shared.patience import patiently
from headrace_shared.subjects import (
    StreamSpec,
    all_object_infos,
    object_chunks_subject,
    object_info_subject,
    object_stream,
)

PIECE_BYTES = 128 * 1024
"""As NATS' clients cut them."""
READ_PIECES = 4
MAX_AT_ONCE = 4
"""Reads and writes of one store: they share a connection with what must not wait behind them."""
MAX_PIECES = 1 << 20
MAX_INFO_BYTES = 64 * 1024
MAX_LOOKS = 5
LAG_S = 0.1
"""A broker of a cluster may answer before it knows what another one has stored."""
_DIGEST = "SHA-256="


class ObjectDamaged(BusError):
    """Pieces are missing, or are not what was written."""


class ObjectInfo(NamedTuple):
    name: str
    nuid: str
    """Names the subject of the pieces."""
    size: int
    num_pieces: int
    digest: bytes
    """SHA-256."""


class _Info(Struct, frozen=True, kw_only=True):
    """The description as NATS has it. Unknown fields are passed over."""

    name: str
    bucket: str
    nuid: str
    size: int = 0
    chunks: int = 0
    digest: str = ""
    mtime: str = ""
    deleted: bool = False
    options: dict[str, Any] = {}


class ObjectStore:
    def __init__(self, bus: Bus, spec: StreamSpec) -> None:
        """`spec`: as `subjects.objects_spec` makes it."""
        self._bus = bus
        self._spec = spec
        self._bucket = spec.name.removeprefix(object_stream(""))
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def open(self) -> None:
        """Raises BusError."""
        await self._bus.ensure_stream(self._spec)

    def writer(self, name: str) -> "ObjectWriter":
        """`name`: one token of a subject, never used before."""
        return ObjectWriter(self._bus, self._bucket, name, self._turns)

    async def info(self, name: str) -> ObjectInfo | None:
        """None if there is none, or none complete. Raises BusError; ProtocolError for a description that is none."""
        message = await self._bus.last(self._spec.name, object_info_subject(self._bucket, name))
        return None if message is None else _info_of(message)

    async def infos(self, limit: int) -> list[ObjectInfo]:
        """Of at most `limit` objects. Raises BusError, ProtocolError."""
        messages = await self._bus.read(self._spec.name, all_object_infos(self._bucket), limit)
        return [info for message in messages if (info := _info_of(message)) is not None]

    async def pieces(self, info: ObjectInfo) -> AsyncGenerator[bytes, None]:
        """The content. Checked as far as it goes, and the last piece is given out only when all were right. Raises
        ObjectDamaged, BusError."""
        digest, size, count, sequence = hashlib.sha256(), 0, 0, 1
        subject = object_chunks_subject(self._bucket, info.nuid)
        held: bytes | None = None
        num_looks = 0
        while count < info.num_pieces:
            wanted = min(READ_PIECES, info.num_pieces - count)
            async with self._turns:
                messages = await patiently(partial(self._bus.read, self._spec.name, subject, wanted, sequence))
            if not messages:
                num_looks += 1
                if num_looks >= MAX_LOOKS:
                    raise ObjectDamaged(f"{info.name}: {count} of {info.num_pieces} pieces are there")
                await asyncio.sleep(LAG_S)
                continue
            for message in messages:
                if held is not None:
                    yield held
                held = message.data
                digest.update(held)
                size += len(held)
                count += 1
            if size > info.size:
                break
            sequence = messages[-1].stream_sequence + 1
        if size != info.size or digest.digest() != info.digest:
            raise ObjectDamaged(f"{info.name}: not what was written")
        if held is not None:
            yield held

    async def delete(self, name: str) -> None:
        """Complete or not. No error if there is none. Raises BusError."""
        message = await self._bus.last(self._spec.name, object_info_subject(self._bucket, name))
        nuids = {name}
        if message is not None:
            nuids |= {info.nuid for info in [_info_of(message)] if info is not None}
            await self._bus.purge(self._spec.name, object_info_subject(self._bucket, name))
        for nuid in nuids:
            await self._bus.purge(self._spec.name, object_chunks_subject(self._bucket, nuid))


class ObjectWriter:
    """Writes one object from first to last byte. Left without `finish`, what was written stays without a description:
    the name is to be deleted."""

    def __init__(self, bus: Bus, bucket: str, name: str, turns: asyncio.Semaphore) -> None:
        self._bus = bus
        self._bucket = bucket
        self._name = name
        self._turns = turns
        self._piece_bytes = min(PIECE_BYTES, bus.max_payload)
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self._num_pieces = 0
        self.size = 0

    async def write(self, data: bytes) -> None:
        """Raises QueueFull when the store has no room, BusError."""
        self.size += len(data)
        self._buffer += data
        while len(self._buffer) >= self._piece_bytes:
            piece = bytes(self._buffer[: self._piece_bytes])
            del self._buffer[: self._piece_bytes]
            await self._store(piece)

    async def finish(self) -> ObjectInfo:
        """Returns when the object is complete in the broker. Raises as `write`."""
        if self._buffer:
            await self._store(bytes(self._buffer))
            self._buffer.clear()
        digest = self._digest.digest()
        info = ObjectInfo(self._name, self._name, self.size, self._num_pieces, digest)
        described = _Info(
            name=self._name,
            bucket=self._bucket,
            nuid=self._name,
            size=self.size,
            chunks=self._num_pieces,
            digest=_DIGEST + base64.urlsafe_b64encode(digest).decode(),
            mtime=datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            options={"max_chunk_size": self._piece_bytes},
        )
        await self._enqueue(object_info_subject(self._bucket, self._name), msgspec.json.encode(described), "info")
        return info

    async def _store(self, piece: bytes) -> None:
        if self._num_pieces >= MAX_PIECES:
            raise BusRefused(f"{self._name}: more than {MAX_PIECES} pieces")
        self._digest.update(piece)
        self._num_pieces += 1
        await self._enqueue(object_chunks_subject(self._bucket, self._name), piece, str(self._num_pieces))

    async def _enqueue(self, subject: str, data: bytes, what: str) -> None:
        # The stream holds the pieces, so that the broker knows their ids again even when it was restarted between two
        # attempts.
        message_id = f"{self._bucket}-{self._name}-{what}"
        async with self._turns:
            await patiently(partial(self._bus.enqueue, subject, data, message_id=message_id))


def _info_of(message: Message) -> ObjectInfo | None:
    """None for one that is marked as deleted."""
    if len(message.data) > MAX_INFO_BYTES:
        raise ProtocolError(f"a description of {len(message.data)} bytes")
    try:
        told = msgspec.json.decode(message.data, type=_Info)
        digest = base64.urlsafe_b64decode(told.digest.removeprefix(_DIGEST))
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"no description of an object: {error}") from error
    if told.deleted:
        return None
    if not (0 <= told.chunks <= MAX_PIECES and told.size >= 0 and len(digest) == hashlib.sha256().digest_size):
        raise ProtocolError(f"the description of {told.name!r} is not plausible")
    return ObjectInfo(told.name, told.nuid, told.size, told.chunks, digest)
