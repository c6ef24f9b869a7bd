"""Compare-and-set leases with epochs (ARCHITECTURE.md, "Lease and epoch"), kept in a bucket.

A lease is a key whose value names a holder and an epoch. Taking it raises the epoch by one; a renewal writes the same
value again, so that the key's revision moves on. Others hold a lease for expired when they have seen no new revision
for LEASE_TTL_S on their own monotonic clock; the holder holds it for lost LEASE_TTL_S after it *sent* its last
confirmed renewal. What others see cannot be earlier than what the holder sent, so the holder always gives up first.

`LeaseTable` is the pure part, `Leases` the part with a bus.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog
from msgspec import Struct

from headrace_shared.beats import beat
from headrace_shared.bus import Bus, Entry, Subscription
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, ProtocolError, RevisionConflict
from headrace_shared.tasks import end

log = structlog.get_logger(__name__)

LEASE_TTL_S = 3.0
RENEW_S = 1.0
CHECK_S = 0.1
"""How late a holder may notice that its time is up, and how soon a failed renewal is tried again."""


class LeaseRecord(Struct, frozen=True, tag=True, kw_only=True):
    """The value of a lease's key."""

    holder: str
    """Empty: released."""
    epoch: int
    """Rises by one with each change of holder. A released lease keeps its epoch, so that it never goes back."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What a holder has. A value: renewing gives a new one."""

    key: str
    epoch: int
    revision: int
    confirmed_at: float
    """Monotonic time at which the last confirmed write was sent."""

    def is_valid(self, now: float) -> bool:
        return now - self.confirmed_at < LEASE_TTL_S


@dataclass(frozen=True, slots=True)
class ObservedLease:
    record: LeaseRecord
    revision: int
    changed_at: float
    """By the observer's monotonic clock."""


class LeaseTable:
    """What an observer knows of the leases of a bucket. Pure: time is an argument."""

    def __init__(self) -> None:
        self._leases: dict[str, ObservedLease] = {}

    def observe(self, key: str, entry: Entry | None, now: float) -> None:
        """Takes what a watch reports; None for a removed key. A revision that is not newer says nothing new, so that a
        watch may repeat itself. Raises ProtocolError for what is no lease: it is no sign of life, but its revision is
        kept, without which nobody could ever take the lease again."""
        if entry is None:
            self._leases.pop(key, None)
            return
        known = self._leases.get(key)
        if known is not None and entry.revision <= known.revision:
            return
        try:
            self._leases[key] = ObservedLease(decode(entry.value, LeaseRecord), entry.revision, now)
        except ProtocolError:
            known = known or ObservedLease(LeaseRecord(holder="", epoch=0), 0, now)
            self._leases[key] = replace(known, revision=entry.revision)
            raise

    def get(self, key: str) -> ObservedLease | None:
        return self._leases.get(key)

    def keys(self) -> list[str]:
        return list(self._leases)

    def is_free(self, key: str, now: float) -> bool:
        """Never taken, released, or without a renewal for LEASE_TTL_S. Taking it may still fail."""
        known = self._leases.get(key)
        return known is None or not known.record.holder or now - known.changed_at >= LEASE_TTL_S


class Leases:
    """Takes, renews and releases leases of one bucket for one holder. `open` before use."""

    def __init__(self, bus: Bus, bucket: str, holder: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`holder` is unique for each start of a process. The bucket must exist."""
        self._bus = bus
        self._bucket = bucket
        self._holder = holder
        self._clock = clock
        self._table = LeaseTable()
        self._held: dict[str, Lease] = {}
        self._watch: Subscription | None = None

    async def open(self) -> None:
        """Starts watching the bucket. Raises BusUnavailable."""
        self._watch = await self._bus.watch(self._bucket, self._on_change)

    async def close(self) -> None:
        """Stops watching. Releases nothing."""
        if self._watch is not None:
            await self._watch.close()

    @property
    def held(self) -> dict[str, Lease]:
        """key -> lease, only those that are valid now."""
        now = self._clock()
        return {key: lease for key, lease in self._held.items() if lease.is_valid(now)}

    def is_free(self, key: str) -> bool:
        return self._table.is_free(key, self._clock())

    def observed(self, key: str) -> ObservedLease | None:
        """Who holds the key, as far as we have seen."""
        return self._table.get(key)

    async def acquire(self, key: str, least_epoch: int = 1) -> Lease | None:
        """Takes the lease if it is free, with an epoch of `least_epoch` or more. None if another holds it or was
        faster. Raises BusUnavailable, OutcomeUnknown (then try again: our own write counts as somebody's and expires
        like it)."""
        now = self._clock()
        if not self._table.is_free(key, now):
            return None
        known = self._table.get(key)
        epoch = max(least_epoch, 1 if known is None else known.record.epoch + 1)
        value = encode(LeaseRecord(holder=self._holder, epoch=epoch))
        try:
            if known is None:
                revision = await self._bus.create(self._bucket, key, value)
            else:
                revision = await self._bus.update(self._bucket, key, value, known.revision)
        except RevisionConflict:
            return None
        lease = Lease(key, epoch, revision, now)
        self._held[key] = lease
        self._table.observe(key, Entry(key, value, revision), now)
        return lease

    async def renew(self, key: str) -> Lease:
        """Raises RevisionConflict if the lease is lost (it is then no longer held), BusUnavailable, OutcomeUnknown."""
        lease = self._held.get(key)
        if lease is None:
            raise RevisionConflict(f"{self._bucket}/{key}: not held")
        try:
            return await self._write_again(lease)
        except RevisionConflict:
            self._drop(lease)
            raise

    async def _write_again(self, lease: Lease) -> Lease:
        key, now = lease.key, self._clock()
        if not lease.is_valid(now):
            raise RevisionConflict(f"{self._bucket}/{key}: not renewed in time")
        value = encode(LeaseRecord(holder=self._holder, epoch=lease.epoch))
        try:
            revision = await self._bus.update(self._bucket, key, value, lease.revision)
        except RevisionConflict:
            # An earlier renewal of ours, whose answer was lost, looks the same.
            entry = await self._bus.get(self._bucket, key)
            if entry is None or entry.value != value:
                raise
            revision = await self._bus.update(self._bucket, key, value, entry.revision)
        if self._held.get(key) is not lease:
            raise RevisionConflict(f"{self._bucket}/{key}: given up meanwhile")
        renewed = replace(lease, revision=revision, confirmed_at=now)
        self._held[key] = renewed
        self._table.observe(key, Entry(key, value, revision), now)
        return renewed

    def _drop(self, lease: Lease) -> bool:
        """False if it was not held any more."""
        was_held = self._held.get(lease.key) is lease
        if was_held:
            del self._held[lease.key]
        return was_held

    async def release(self, key: str) -> None:
        """Gives the lease up at once, so that others need not wait. No error if it is not held. BusUnavailable,
        OutcomeUnknown: it will expire."""
        lease = self._held.pop(key, None)
        if lease is None:
            return
        value = encode(LeaseRecord(holder="", epoch=lease.epoch))
        try:
            await self._bus.update(self._bucket, key, value, lease.revision)
        except RevisionConflict:
            log.debug("released a lease that was lost", key=key)

    async def forget(self, key: str) -> None:
        """Removes the key of something that will never come back, if it is free."""
        known = self._table.get(key)
        if known is not None and self.is_free(key):
            try:
                await self._bus.remove(self._bucket, key, known.revision)
            except RevisionConflict:
                log.debug("somebody took the lease that was to be forgotten", key=key)

    async def keep(self, on_lost: Callable[[str], None]) -> None:
        """Renews all that is held every RENEW_S, for ever; run it as a task. Calls `on_lost(key)` once when a lease is
        lost to another or could not be confirmed for LEASE_TTL_S, even while a renewal hangs."""
        renewals: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                now = self._clock()
                for key in [key for key, task in renewals.items() if task.done()]:
                    renewals.pop(key).result()
                for key, lease in list(self._held.items()):
                    if not lease.is_valid(now):
                        self._drop(lease)
                        self._report_lost(lease, "not renewed in time", on_lost)
                    elif now - lease.confirmed_at >= RENEW_S and key not in renewals:
                        renewals[key] = asyncio.create_task(self._renew_quietly(lease, on_lost), name="renew-lease")
                await beat(CHECK_S)
        finally:
            for task in renewals.values():
                await end(task)

    async def _renew_quietly(self, lease: Lease, on_lost: Callable[[str], None]) -> None:
        try:
            await self._write_again(lease)
        except RevisionConflict as error:
            if self._drop(lease):
                self._report_lost(lease, str(error), on_lost)
        except BusError as error:
            log.debug("lease not renewed yet", error=str(error), key=lease.key)

    def _report_lost(self, lease: Lease, reason: str, on_lost: Callable[[str], None]) -> None:
        log.warning("lease lost", reason=reason, key=lease.key, epoch=lease.epoch)
        on_lost(lease.key)

    def _on_change(self, entry: Entry | None, key: str) -> None:
        try:
            self._table.observe(key, entry, self._clock())
        except ProtocolError as error:
            log.warning("undecodable lease", error=str(error), key=key)
