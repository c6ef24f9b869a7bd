"""Which batches this router runs: takes leases of those whose turn it is, and gives them up when it drains.

Every router watches all batches and decides alike whose turn it is (`turns`). Who has fewer tries sooner. A router that
dies is noticed by its leases, and what it ran goes on elsewhere.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from headrace_router.batches.record import BatchRecord, IllegalTransition, taken
from headrace_router.batches.run import BatchRun, Parts
from headrace_router.batches.store import Superseded
from headrace_router.batches.turns import ActiveLimits, nearest, turns
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.leases import Leases
from headrace_shared.subjects import BATCH_LEASES, BATCH_RESULTS
from headrace_shared.tasks import end

log = structlog.get_logger(__name__)

TICK_S = 0.2
HEAD_START_S = 0.1
"""For those who run fewer, for each batch that is run here."""
SWEEP_S = 60.0
"""Between two looks for files that nobody will see again."""
MIN_BACKOFF_S = 2.0
MAX_BACKOFF_S = 60.0
MAX_OUTAGE_BACKOFF_S = 4.0
"""Where it was the broker that could not be reached: that was waited for already, and is no fault of the batch."""
MAX_KNOWN = 10_000
"""Unfinished batches, or a quarter more for a moment: those whose turn comes first. The others are read again when half
of these are over."""
MAX_OVER = 10_000
TIDYING = "tidying"
"""The lease of who deletes files that have expired, and results of batches that are over."""


class _Running(NamedTuple):
    run: BatchRun
    task: "asyncio.Task[None]"


class _Troubled(NamedTuple):
    num_times: int
    until: float


class BatchRunner:
    """`open`, then `run` as a task, then `close`."""

    def __init__(
        self,
        bus: Bus,
        router: str,
        parts: Parts,
        limits: ActiveLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._parts = parts
        self._limits = limits
        self._clock = clock
        self._leases = Leases(bus, BATCH_LEASES.name, router)
        self._known: dict[str, BatchRecord] = {}
        """Those that are not over, by their keys in the bucket."""
        self._free_since: dict[str, float] = {}
        self._running: dict[str, _Running] = {}
        self._troubled: dict[str, _Troubled] = {}
        self._are_more = False
        """There are unfinished batches that are not known here."""
        self._heard: set[str] | None = None
        """Keys of records that have changed while all are being read again."""
        self._over: set[str] = set()
        """Ids of batches whose results in the journal nobody needs."""
        self._swept_at = clock()
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._is_closing = False

    async def open(self) -> None:
        """Raises BusError."""
        await self._bus.ensure_bucket(BATCH_LEASES)
        await self._leases.open()
        await self._parts.store.watch(self._on_change)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def in_use(self) -> set[str]:
        """Files that unfinished batches read."""
        return {record.input_file_id for record in self._known.values()}

    async def run(self) -> None:
        """Until cancelled. Costs nothing while there is no batch."""
        try:
            while True:
                self._changed.clear()
                await self._tick()
                await self._rest()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S if self._known or self._running else SWEEP_S):
                        await self._changed.wait()
        finally:
            for task in (self._keeper, self._sweeping):
                if task is not None:
                    await end(task)

    async def close(self) -> None:
        """What runs here is left to others, from now on. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        for running in self._running.values():
            running.task.cancel()
        await asyncio.gather(*(running.task for running in self._running.values()), return_exceptions=True)
        try:
            async with asyncio.timeout(1.0):
                for key in list(self._leases.held):
                    await self._leases.release(key)
        except (BusError, TimeoutError) as error:
            log.info("batches not handed over; others will notice", error=str(error))
        await self._leases.close()

    def _renew(self) -> None:
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._leases.keep(self._on_lost), name="batch-leases")

    async def _rest(self) -> None:
        """Nothing is renewed where nothing is held. But what runs is told by the keeper that its lease is lost."""
        if self._keeper is not None and self._keeper.done():
            self._keeper.result()
        if self._keeper is not None and not self._leases.held and not self._running:
            await end(self._keeper)
            self._keeper = None

    async def _tick(self) -> None:
        if self._is_closing or not self._bus.is_connected:
            return
        try:
            if self._are_more and len(self._known) <= MAX_KNOWN // 2:
                await self._read_again()
            for record in self._next():
                await self._take(record)
        except BusError as error:
            log.info("batches must wait", error=str(error))
        if self._clock() - self._swept_at >= SWEEP_S and (self._sweeping is None or self._sweeping.done()):
            self._swept_at = self._clock()
            self._sweeping = asyncio.create_task(self._sweep(), name="file-sweep")

    def _next(self) -> list[BatchRecord]:
        """Those to be taken now."""
        now = self._clock()
        chosen = turns(self._known.values(), self._limits, self._parts.clock())
        found: list[BatchRecord] = []
        for record in self._known.values():
            if record.endpoint not in self._parts.executor.endpoints:
                continue  # of a newer version
            batch_id = record.batch_id
            troubled = self._troubled.get(batch_id)
            is_free = batch_id in chosen and batch_id not in self._running and self._leases.is_free(_key(batch_id))
            if not is_free or (troubled is not None and now < troubled.until):
                self._free_since.pop(batch_id, None)
            elif now - self._free_since.setdefault(batch_id, now) >= HEAD_START_S * (len(self._running) + len(found)):
                found.append(record)
        return found

    async def _take(self, known: BatchRecord) -> None:
        batch_id, key = known.batch_id, _key(known.batch_id)
        lease = await self._leases.acquire(key, known.epoch + 1)
        if lease is None:
            return
        self._renew()
        try:
            record = await self._parts.store.change(
                known, lambda record: taken(record, lease.epoch, self._parts.clock())
            )
        except (Superseded, IllegalTransition) as error:
            log.debug("batch not taken", batch_id=batch_id, reason=str(error))
            await self._leases.release(key)
            return
        except BusError:
            # Kept, the lease would be renewed for ever, and nobody would work on the batch.
            await self._give_up(batch_id)
            raise
        log.info("batch taken", batch_id=batch_id, state=record.state, epoch=lease.epoch)
        run = BatchRun(record, self._parts)
        self._running[batch_id] = _Running(run, asyncio.create_task(self._work(batch_id, run), name="batch"))

    async def _work(self, batch_id: str, run: BatchRun) -> None:
        try:
            await run.run()
            self._troubled.pop(batch_id, None)
            self._forget(batch_id)
        except Superseded:
            log.info("somebody else has the batch", batch_id=batch_id)
        except BusError as error:
            self._trouble(batch_id, MAX_OUTAGE_BACKOFF_S)
            log.warning("batch interrupted", batch_id=batch_id, error=str(error))
        except Exception:  # one batch's fault must not cost the others
            self._trouble(batch_id, MAX_BACKOFF_S)
            log.exception("batch failed; it is tried again", batch_id=batch_id)
        finally:
            del self._running[batch_id]
            if not self._is_closing:
                await self._give_up(batch_id)

    async def _give_up(self, batch_id: str) -> None:
        try:
            await self._leases.release(_key(batch_id))
        except BusError as error:
            log.info("lease not released; it will expire", batch_id=batch_id, error=str(error))

    def _trouble(self, batch_id: str, most_s: float) -> None:
        before = self._troubled.get(batch_id)
        num_times = 1 if before is None else before.num_times + 1
        wait_s = min(most_s, MIN_BACKOFF_S * 2.0 ** min(num_times - 1, 16))
        self._troubled[batch_id] = _Troubled(num_times, self._clock() + wait_s)

    def _forget(self, batch_id: str) -> None:
        for key in [key for key, record in self._known.items() if record.batch_id == batch_id]:
            del self._known[key]

    def _on_change(self, key: str, record: BatchRecord | None) -> None:
        if self._heard is not None:
            self._heard.add(key)
        if record is None or record.is_over:
            if record is not None and self._may_have_results(record) and len(self._over) < MAX_OVER:
                self._over.add(record.batch_id)
            self._drop(key)
            return
        self._changed.set()
        self._known[key] = record
        if len(self._known) > MAX_KNOWN + MAX_KNOWN // 4:
            kept = nearest(self._known, MAX_KNOWN)
            for far in [known for known in self._known if known not in kept]:
                self._drop(far)
            self._are_more = True
        running = self._running.get(record.batch_id)
        if running is not None:
            running.run.on_change(record)

    def _drop(self, key: str) -> None:
        gone = self._known.pop(key, None)
        if gone is not None:
            self._troubled.pop(gone.batch_id, None)
            self._free_since.pop(gone.batch_id, None)

    async def _read_again(self) -> None:
        """Raises BusError."""
        self._heard = set()
        try:
            read = await self._parts.store.all()
        finally:
            heard, self._heard = self._heard, None
        self._are_more = False
        for key, record in read:
            # What was heard meanwhile is newer.
            if key not in heard:
                self._on_change(key, record)

    def _may_have_results(self, record: BatchRecord) -> bool:
        """Where it has not been so long that they are gone anyway."""
        ended_at = max(record.completed_at, record.expired_at, record.cancelled_at, record.failed_at)
        return record.in_progress_at > 0 and self._parts.clock() - ended_at < (BATCH_RESULTS.max_age_s or math.inf)

    def _on_lost(self, key: str) -> None:
        running = self._running.get(key.removeprefix(_key("")))
        if running is not None:
            running.task.cancel()

    async def _sweep(self) -> None:
        """By one of the routers."""
        last = self._leases.observed(TIDYING)
        if last is not None and self._clock() - last.changed_at < SWEEP_S / 2:
            return
        try:
            if await self._leases.acquire(TIDYING) is None:
                return
            self._renew()
            try:
                over = set(self._over)
                await self._parts.journal.tidy(over)
                self._over -= over
                # What an unfinished batch reads that is not known here must stay.
                num_swept = 0 if self._are_more else await self._parts.library.sweep(self.in_use())
            finally:
                await self._leases.release(TIDYING)
                self._changed.set()  # nobody needs the keeper until the next batch
        except BusError as error:
            log.info("files not tidied up yet", error=str(error))
        else:
            if num_swept:
                log.info("files deleted", num_files=num_swept)


def _key(batch_id: str) -> str:
    return f"batch.{batch_id}"
