"""What clients do with batches: make, look at, list, cancel."""

import hashlib
import secrets
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from headrace_router.batches.record import WINDOW, BatchRecord, BatchState, IllegalTransition, cancelled
from headrace_router.batches.schemas import BatchBody
from headrace_router.batches.store import BatchStore, Superseded
from headrace_router.field_names import FieldName, in_words_of
from headrace_router.files.library import FileLibrary
from headrace_router.files.record import LONGEST_LIFE_S, SHORTEST_LIFE_S
from headrace_router.identity import Identity
from headrace_router.owners import owner_token
from headrace_shared.errors import InvalidRequest, LimitReached, RevisionConflict

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
BUSY_RETRY_S = 30.0
MAX_KEPT = 500
"""Batches of one tenant; of those that are over, the oldest are forgotten. Their files stay."""


class DeskSettings(NamedTuple):
    window_s: float
    max_unfinished: int
    """Batches of one tenant."""


class BatchDesk:
    def __init__(
        self,
        store: BatchStore,
        library: FileLibrary,
        endpoints: Collection[str],
        settings: DeskSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: seconds since the epoch."""
        self._store = store
        self._library = library
        self._endpoints = endpoints
        self._settings = settings
        self._clock = clock

    async def create(self, identity: Identity, body: BatchBody, idempotency_key: str | None) -> BatchRecord:
        """With an idempotency key, the one that was made under it. Raises RequestError, BusError."""
        self._check(body)
        batch_id = _batch_id(identity.owner, idempotency_key)
        if idempotency_key is not None and (kept := await self._store.get(identity.owner, batch_id)) is not None:
            return _same(kept.record, body)
        with in_words_of((FieldName("file_id", "input_file_id"),)):
            file = await self._library.find(owner_token(identity.owner), body.input_file_id)
        if file.purpose != "batch":
            raise InvalidRequest("The input file's purpose must be batch.", param="input_file_id")
        await self._library.check_room(owner_token(identity.owner))
        known = await self._store.all_of(identity.owner)
        unfinished = [record for record in known if not record.is_over]
        if len(unfinished) >= self._settings.max_unfinished:
            raise self._too_many()
        for old in [record for record in known if record.is_over][max(0, MAX_KEPT - len(unfinished) - 1) :]:
            await self._store.forget(old)
        now = self._clock()
        record = BatchRecord(
            batch_id=batch_id,
            owner=identity.owner,
            key_id=identity.key.key_id if identity.key is not None else "",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            created_at=now,
            expires_at=int(now + self._settings.window_s),
            metadata=body.metadata,
            output_life_s=body.output_expires_after.seconds if body.output_expires_after else LONGEST_LIFE_S,
        )
        try:
            revision = await self._store.create(record)
        except RevisionConflict:
            return _same((await self._get(identity, batch_id)), body)
        if await self._num_ahead(record, revision) >= self._settings.max_unfinished:
            await self._store.forget(record)
            raise self._too_many()
        return record

    async def _num_ahead(self, own: BatchRecord, revision: int) -> int:
        """How many of its owner's unfinished batches were there first: others may have been made at the same moment,
        also at other routers. Where that cannot be told any more, they were."""
        return sum(
            kept.revision < revision or kept.record.epoch > 0 or kept.record.state is not BatchState.VALIDATING
            for kept in await self._store.kept_of(own.owner)
            if kept.record.batch_id != own.batch_id and not kept.record.is_over
        )

    def _too_many(self) -> LimitReached:
        return LimitReached(
            f"You may have at most {self._settings.max_unfinished} unfinished batches.",
            retry_after_s=BUSY_RETRY_S,
            code="too_many_batches",
        )

    async def get(self, identity: Identity, batch_id: str) -> BatchRecord:
        """Raises InvalidRequest (404), BusError."""
        return await self._get(identity, batch_id)

    async def all_of(self, identity: Identity) -> list[BatchRecord]:
        """Newest first. Raises BusError."""
        return await self._store.all_of(identity.owner)

    async def cancel(self, identity: Identity, batch_id: str) -> BatchRecord:
        """No error if it is being cancelled already. Raises InvalidRequest, BusError."""
        record = await self._get(identity, batch_id)
        try:
            return await self._store.change(record, self._cancelled)
        except IllegalTransition:
            now = await self._get(identity, batch_id)
            raise InvalidRequest(
                f"A batch with status '{now.state.value}' cannot be cancelled.", code="batch_not_cancellable"
            ) from None
        except Superseded:
            raise _not_found(batch_id) from None

    async def check_unused(self, identity: Identity, file_id: str) -> None:
        """Raises InvalidRequest (409) for the input of an unfinished batch."""
        for record in await self._store.all_of(identity.owner):
            if not record.is_over and record.input_file_id == file_id:
                raise InvalidRequest(
                    f"The file is the input of '{record.batch_id}', which is not finished.",
                    param="file_id",
                    code="file_in_use",
                )

    def _cancelled(self, record: BatchRecord) -> BatchRecord:
        return record if record.cancelling_at else cancelled(record, self._clock())

    async def _get(self, identity: Identity, batch_id: str) -> BatchRecord:
        kept = await self._store.get(identity.owner, batch_id) if _is_batch_id(batch_id) else None
        if kept is None:
            raise _not_found(batch_id)
        return kept.record

    def _check(self, body: BatchBody) -> None:
        if body.endpoint not in self._endpoints:
            known = ", ".join(sorted(self._endpoints))
            raise InvalidRequest(f"'endpoint' must be one of: {known}.", param="endpoint")
        if body.completion_window != WINDOW:
            raise InvalidRequest(f"'completion_window' must be {WINDOW}.", param="completion_window")
        metadata = body.metadata or {}
        if len(metadata) > MAX_METADATA:
            raise InvalidRequest(f"'metadata' may have at most {MAX_METADATA} entries.", param="metadata")
        for key, value in metadata.items():
            if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
                raise InvalidRequest(
                    f"'metadata' may have keys of {MAX_METADATA_KEY_CHARS} and values of {MAX_METADATA_VALUE_CHARS} "
                    "characters.",
                    param="metadata",
                )
        life = body.output_expires_after
        if life is not None and life.anchor != "created_at":
            raise InvalidRequest("'output_expires_after.anchor' must be created_at.", param="output_expires_after")
        if life is not None and not SHORTEST_LIFE_S <= life.seconds <= LONGEST_LIFE_S:
            raise InvalidRequest(
                f"'output_expires_after.seconds' must be from {SHORTEST_LIFE_S} to {LONGEST_LIFE_S}.",
                param="output_expires_after",
            )


def _batch_id(owner: str, idempotency_key: str | None) -> str:
    if idempotency_key is None:
        return f"batch_{secrets.token_hex(16)}"
    digest = hashlib.sha256(f"{owner}\0{idempotency_key}".encode()).hexdigest()
    return f"batch_{digest[:32]}"


def _is_batch_id(given: str) -> bool:
    digits = given.removeprefix("batch_")
    return given.startswith("batch_") and len(digits) == 32 and set(digits) <= set("0123456789abcdef")


def _same(record: BatchRecord, body: BatchBody) -> BatchRecord:
    if (record.endpoint, record.input_file_id, record.metadata) != (body.endpoint, body.input_file_id, body.metadata):
        raise InvalidRequest(
            "This Idempotency-Key was used for another batch.", param="Idempotency-Key", code="idempotency_key_reused"
        )
    return record


def _not_found(batch_id: str) -> InvalidRequest:
    return InvalidRequest(f"There is no batch '{batch_id[:64]}'.", param="batch_id", code="batch_not_found")
