"""The records of batches in the broker's bucket: changed by compare-and-set, watched by every router."""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import structlog

from headrace_router.batches.record import BatchRecord
from headrace_router.owners import owner_token
from headrace_shared.bus import Bus, Entry
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusUnavailable, OutcomeUnknown, ProtocolError, RevisionConflict
from headrace_shared.patience import patiently
from headrace_shared.subjects import BATCHES

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 32
"""Of a change. Each failure means that somebody else's succeeded."""


class Superseded(Exception):
    """Another router works on the batch now, or it is gone."""


class Kept(NamedTuple):
    record: BatchRecord
    revision: int


class BatchStore:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def open(self) -> None:
        """Raises BusError."""
        await self._bus.ensure_bucket(BATCHES)

    async def watch(self, on_change: Callable[[str, BatchRecord | None], None]) -> None:
        """`on_change(key, record)` on the event loop, for each record there is and each change. Raises BusError."""

        def on_entry(entry: Entry | None, key: str) -> None:
            on_change(key, None if entry is None else _decoded(entry))

        await self._bus.watch(BATCHES.name, on_entry)

    async def create(self, record: BatchRecord) -> int:
        """Its revision. Raises RevisionConflict if there is one with this id, BusError."""
        return await self._bus.create(BATCHES.name, _key(record.owner, record.batch_id), encode(record))

    async def get(self, owner: str, batch_id: str) -> Kept | None:
        """`owner`: as in `Identity`. Raises BusError."""
        entry = await self._bus.get(BATCHES.name, _key(owner, batch_id))
        record = None if entry is None else _decoded(entry)
        return None if entry is None or record is None else Kept(record, entry.revision)

    async def all(self) -> list[tuple[str, BatchRecord]]:
        """With their keys, in any order. Raises BusError."""
        entries = [(entry.key, _decoded(entry)) for entry in await self._bus.entries(BATCHES.name)]
        return [(key, record) for key, record in entries if record is not None]

    async def all_of(self, owner: str) -> list[BatchRecord]:
        """Newest first. Raises BusError."""
        found = [kept.record for kept in await self.kept_of(owner)]
        return sorted(found, key=lambda record: (record.created_at, record.batch_id), reverse=True)

    async def kept_of(self, owner: str) -> list[Kept]:
        """In any order. Raises BusError."""
        entries = [(entry, _decoded(entry)) for entry in await self._bus.entries(BATCHES.name, owner_token(owner))]
        return [Kept(record, entry.revision) for entry, record in entries if record is not None]

    async def forget(self, record: BatchRecord) -> None:
        """Raises BusError."""
        await self._bus.remove(BATCHES.name, _key(record.owner, record.batch_id))

    async def change(
        self, record: BatchRecord, change: Callable[[BatchRecord], BatchRecord], epoch: int | None = None
    ) -> BatchRecord:
        """Makes the change of the record as it is now; returns what it is then. `epoch`: whose holder we are. Raises
        Superseded, what `change` raises, and BusError."""
        tried: BatchRecord | None = None
        for _ in range(MAX_ATTEMPTS):
            kept = await patiently(partial(self.get, record.owner, record.batch_id))
            if kept is None:
                raise Superseded(record.batch_id)
            if kept.record == tried:
                return kept.record  # ours after all
            if epoch is not None and kept.record.epoch != epoch:
                raise Superseded(record.batch_id)
            tried = None
            changed = change(kept.record)
            if changed == kept.record:
                return changed
            try:
                await self._bus.update(
                    BATCHES.name, _key(record.owner, record.batch_id), encode(changed), kept.revision
                )
                return changed
            except OutcomeUnknown:
                tried = changed
            except RevisionConflict:
                log.debug("a batch has changed meanwhile", batch_id=record.batch_id)
            await asyncio.sleep(random.uniform(0.0, 0.02))
        raise BusUnavailable(f"{record.batch_id} keeps changing")


def _key(owner: str, batch_id: str) -> str:
    return f"{owner_token(owner)}.{batch_id}"


def _decoded(entry: Entry) -> BatchRecord | None:
    try:
        return decode(entry.value, BatchRecord)
    except ProtocolError as error:
        log.warning("undecodable batch", key=entry.key, error=str(error))
        return None
