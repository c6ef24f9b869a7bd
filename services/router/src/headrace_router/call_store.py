"""Records of calls that may be continued, and idempotency keys, in the broker's buckets."""

import hashlib
from typing import NamedTuple

import structlog
from msgspec import Struct

from headrace_router.call_record import CallRecord
from headrace_shared.bus import Bus
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, InvalidRequest, ProtocolError, RevisionConflict, ServiceFailure
from headrace_shared.messages import LogMessage, Outcome, RequestEnded, RequestId, RouterId
from headrace_shared.subjects import (
    CALLS,
    DEDUPE_WINDOW_S,
    IDEMPOTENCY,
    TOKEN_LOG_S,
    TOKENS,
    bucket_stream,
    tokens_subject,
)

log = structlog.get_logger(__name__)

SAFE_DEDUPE_S = DEDUPE_WINDOW_S - 30.0
"""The queue surely stores a request once if it is put there twice within this time."""
SURE_LOG_S = TOKEN_LOG_S / 2
"""So long after a call began its log is surely kept, unless its broker has lost it."""


class KeyEntry(Struct, frozen=True, tag=True, kw_only=True):
    """What an idempotency key stands for: enough to queue the same requests again, given the same body."""

    fingerprint: bytes
    """Of endpoint and body."""
    request_id: RequestId
    router: RouterId
    seed: int
    created: int
    claimed_at: float
    """By the broker's clock."""
    model: str = ""
    """Which answers; not always the one that was asked for. Empty: that one."""


class Claim(NamedTuple):
    entry: KeyEntry
    revision: int


class IdempotencyKey(NamedTuple):
    owner: str
    key: str
    fingerprint: bytes

    @property
    def bucket_key(self) -> str:
        return hashlib.sha256(f"{self.owner}\0{self.key}".encode()).hexdigest()


class CallStore:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def open(self) -> None:
        """Raises BusError."""
        for bucket in (CALLS, IDEMPOTENCY):
            await self._bus.ensure_bucket(bucket)

    async def save(self, record: CallRecord) -> None:
        """Raises BusError."""
        await self._bus.put(CALLS.name, record.request_id, encode(record))

    async def load(self, request_id: RequestId) -> CallRecord | None:
        """Raises BusError."""
        entry = await self._bus.get(CALLS.name, request_id)
        if entry is None:
            return None
        try:
            return decode(entry.value, CallRecord)
        except ProtocolError as error:
            log.warning("undecodable record of a call", request_id=request_id, error=str(error))
            return None

    async def find(self, key: IdempotencyKey) -> Claim | None:
        """Who has the key. Raises InvalidRequest if it stands for another request, ServiceFailure if nobody can tell,
        BusError."""
        found = await self._bus.get(IDEMPOTENCY.name, key.bucket_key)
        if found is None:
            return None
        try:
            entry = decode(found.value, KeyEntry)
        except ProtocolError as error:
            log.warning("undecodable idempotency key", error=str(error))
            raise ServiceFailure(
                "What this Idempotency-Key was used for cannot be read.", code="idempotency_key_unreadable"
            ) from error
        if entry.fingerprint != key.fingerprint:
            raise InvalidRequest(
                "This Idempotency-Key was used for another request.",
                param="Idempotency-Key",
                code="idempotency_key_reused",
            )
        return Claim(entry, found.revision)

    async def claim(self, key: IdempotencyKey, entry: KeyEntry, replaces: Claim | None) -> Claim | None:
        """None if somebody else was quicker. Raises BusError."""
        try:
            revision = 0 if replaces is None else replaces.revision
            if revision:
                return Claim(entry, await self._bus.update(IDEMPOTENCY.name, key.bucket_key, encode(entry), revision))
            return Claim(entry, await self._bus.create(IDEMPOTENCY.name, key.bucket_key, encode(entry)))
        except RevisionConflict:
            return None

    async def forget(self, key: IdempotencyKey, claim: Claim) -> None:
        """Its request was not queued: the key is free again."""
        try:
            await self._bus.remove(IDEMPOTENCY.name, key.bucket_key, claim.revision)
        except BusError as error:
            log.info("idempotency key not freed", error=str(error))

    async def erase(self, owner: str, given_key: str, request_id: RequestId) -> None:
        """Nobody will ask again. Raises BusError."""
        await self._bus.remove(IDEMPOTENCY.name, IdempotencyKey(owner, given_key, b"").bucket_key)
        await self._bus.remove(CALLS.name, request_id)

    async def clock(self) -> float:
        """The broker's, for `claimed_at`. Raises BusError."""
        return await self._bus.clock(bucket_stream(IDEMPOTENCY.name))

    async def may_queue_again(self, entry: KeyEntry) -> bool:
        """Raises BusError."""
        return await self.clock() - entry.claimed_at < SAFE_DEDUPE_S

    async def has_come_to_nothing(self, entry: KeyEntry) -> bool:
        """A call without a record was never queued, or nobody has waited for it: its router died before it could tell
        where it is, or the broker was away when the key was to be freed. Raises BusError."""
        if await self.clock() - entry.claimed_at > SURE_LOG_S:
            return False
        last = await self._bus.last(TOKENS.name, tokens_subject(entry.router, entry.request_id))
        if last is None:
            return True
        try:
            event: LogMessage = decode(last.data, LogMessage)
        except ProtocolError as error:
            log.warning("undecodable event in the log", request_id=entry.request_id, error=str(error))
            return False
        return isinstance(event, RequestEnded) and event.outcome is not Outcome.FINISHED
