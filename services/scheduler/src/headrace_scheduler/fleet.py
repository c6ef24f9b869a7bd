"""The workers of one model: who is there, which of them we lease, and when one is lost.

Several schedulers share the workers. A free one is taken at once by a scheduler that holds less than its fair share,
and by any other after a moment, so that none stays free for long.
"""

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from headrace_scheduler.decisions import Adoption, LossCause
from headrace_scheduler.handover import Handover
from headrace_scheduler.hello_facts import apply_hello, departure, facts_of, least_epoch, plausible
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.worker_link import WorkerLink
from headrace_shared import codec
from headrace_shared.beats import beat
from headrace_shared.bus import Bus, Message
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.fleet_messages import Hello, WorkerState
from headrace_shared.leases import Leases
from headrace_shared.messages import ReportMessage, RequestId, SchedulerId, SequenceSnapshot, Snapshot, WorkerId
from headrace_shared.subjects import worker_lease_key

SILENCE_S = 1.8
"""A worker without Hello or Progress for so long is lost: noticed within two seconds. Progress comes every 0.4 s."""
HANG_S = 8.0
"""Where a worker does not say how long its engine may take for an iteration."""
HANG_MARGIN_S = 1.0
"""A worker whose iterations stand still should have given up its engine by itself; so much later it is lost."""
OLD_HELLO_S = 1.0
"""So long after an adoption a Hello may have been said before it: subscriptions keep no order among themselves."""
BANISH_S = 30.0
"""A worker that hung, or told what cannot be, is not leased again for so long."""
TICK_S = 0.1
COURTESY_S = 1.0
"""A free worker is left to peers with less than their share for so long."""
DEFERENCE_S = 2.5
"""A worker whose holder lives, but could not renew its lease, is left to that holder for so long: only there is known
what it held. So a broker that was away for longer than a lease does not shuffle the workers."""
FORGET_S = 60.0
MAX_ADOPTION_DELAY_S = 5.0
MAX_WORKERS = 10_000

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Worker:
    hello: Hello
    heard_at: float
    """Hello or Progress."""
    free_since: float | None = None
    link: WorkerLink | None = None
    last_epoch: int = 0
    """Of our last lease, while the core holds what the worker has; else 0."""
    adopt_at: float = 0.0
    num_failures: int = 0
    """Links broken in a row."""


class Fleet:
    """Belongs to one event loop. Tells the core of workers that come, report and go, and calls
    - `wake()` when something has happened that the core may act on,
    - `on_adoption` with what the snapshot of a worker taught the core,
    - `on_dropped` with requests that a lost worker had, and that the core places when it knows what their log has,
    - `on_usurped(reason)` when a peer has taken a lease of ours: whatever we hold may be the peer's by now; or when
      the core is not to be trusted any more."""

    def __init__(
        self,
        core: Callable[[], Scheduler],
        bus: Bus,
        leases: Leases,
        scheduler_id: SchedulerId,
        *,
        clock: Callable[[], float],
        wake: Callable[[], None],
        on_adoption: Callable[[WorkerId, Adoption, Sequence[SequenceSnapshot]], None],
        on_dropped: Callable[[Sequence[RequestId]], None],
        on_usurped: Callable[[str], None],
        num_schedulers: Callable[[], int],
        is_present: Callable[[str], bool],
    ) -> None:
        self._core = core
        self._bus = bus
        self._leases = leases
        self._id = scheduler_id
        self._clock = clock
        self._wake = wake
        self._on_adoption = on_adoption
        self._on_dropped = on_dropped
        self._on_usurped = on_usurped
        self._num_schedulers = num_schedulers
        self._is_present = is_present
        """Whether a peer lives, as far as is known."""
        self._handover = Handover(core)
        self._workers: dict[WorkerId, _Worker] = {}
        self._connected_since: float | None = None
        self._ticked_at = clock()
        self._is_closing = False

    @property
    def has_active(self) -> bool:
        return any(worker.link is not None and worker.link.is_active for worker in self._workers.values())

    @property
    def num_leased(self) -> int:
        return sum(1 for worker in self._workers.values() if worker.link is not None)

    def link(self, worker_id: WorkerId) -> WorkerLink | None:
        """The link over which grants may flow now."""
        worker = self._workers.get(worker_id)
        return worker.link if worker is not None and worker.link is not None and worker.link.is_active else None

    @property
    def num_ready(self) -> int:
        """Workers of the model that take new sequences, whoever leases them."""
        return sum(self._is_ready(worker) for worker in self._workers.values())

    @property
    def could_leave(self) -> bool:
        """A peer's worker is ready, and all that the core has on workers is under leases that we hold now."""
        workers = self._workers.values()
        is_ours = all(worker.link is not None and worker.link.is_active for worker in workers if worker.last_epoch)
        return is_ours and any(worker.link is None and self._is_ready(worker) for worker in workers)

    def draining(self) -> dict[WorkerId, WorkerLink]:
        """Ours that want to go, where grants may flow."""
        return {
            worker_id: worker.link
            for worker_id, worker in self._workers.items()
            if worker.hello.state is WorkerState.DRAINING and worker.link is not None and worker.link.is_active
        }

    def on_hello(self, message: Message) -> None:
        try:
            hello = plausible(codec.decode(message.data, Hello))
        except ProtocolError as error:
            log.warning("unusable hello dropped", error=str(error))
            return
        now = self._clock()
        worker = self._workers.get(hello.worker)
        if worker is None:
            if len(self._workers) >= MAX_WORKERS:
                log.warning("too many workers; one more is not noticed", worker=hello.worker)
                return
            worker = self._workers[hello.worker] = _Worker(hello, now)
        worker.hello = hello
        worker.heard_at = now
        gone = departure(hello)
        if gone is not None:
            self._lose(hello.worker, *gone)
            return
        if apply_hello(self._core(), hello, now, accepting=self._may_accept(hello)):
            self._wake()
        link = worker.link
        if link is not None and link.is_active and hello.epoch < link.epoch and now - link.active_since > OLD_HELLO_S:
            link.broken = "the worker has dropped everything"

    def on_report(self, message: Message) -> None:
        try:
            report: ReportMessage = codec.decode(message.data, ReportMessage)
        except ProtocolError as error:
            log.warning("undecodable report dropped", error=str(error))
            return
        worker = self._workers.get(report.worker)
        if worker is None or worker.link is None:
            return
        now = self._clock()
        worker.heard_at = now
        try:
            if isinstance(report, Snapshot):
                self._on_snapshot(worker, report, now)
            elif worker.link.on_progress(report, now):
                self._core().apply_progress(report.worker, report, now)
                if report.sequences or report.released:
                    self._wake()
        except Exception:
            # The core may be half changed, and requests in it would wait for ever.
            log.exception("a report cannot be applied", worker=report.worker)
            worker.link, worker.last_epoch, worker.adopt_at = None, 0, now + BANISH_S
            self._on_usurped(f"a report of {report.worker} cannot be applied")

    async def run(self) -> None:
        """Leases, adopts, sends heartbeats and finds out who is lost; for ever."""
        while True:
            self._tick()
            if self._bus.is_connected and not self._is_closing:
                try:
                    await self._drop_dead()
                    await self._lease_free()
                    await self._balance()
                except BusError as error:
                    log.info("leases not in order yet", error=str(error))
            await beat(TICK_S)

    def on_lease_lost(self, key: str) -> None:
        """Ours no more: taken by a peer, or not confirmed in time. The core keeps what the worker holds for as long as
        nobody else has had it."""
        for worker_id, worker in self._workers.items():
            if worker_lease_key(worker_id) == key:
                worker.link = None

    def find_hangs(self, must_move: Mapping[WorkerId, bool]) -> None:
        """To be called once a second, with whether each worker's engine has something to do."""
        now = self._clock()
        for worker_id, moves in must_move.items():
            worker = self._workers.get(worker_id)
            if worker is None or worker.link is None:
                continue
            if not moves:
                worker.link.iterated_at = now
            elif now - worker.link.iterated_at > (worker.hello.hang_timeout_s or HANG_S) + HANG_MARGIN_S:
                worker.adopt_at = now + BANISH_S
                self._lose(worker_id, "its engine hangs", LossCause.FAILED)

    async def release_all(self) -> None:
        """Gives every lease up, so that peers adopt the workers at once."""
        self._is_closing = True
        keys = list(self._leases.held)
        for worker in self._workers.values():
            worker.link = None
        results = await asyncio.gather(*(self._leases.release(key) for key in keys), return_exceptions=True)
        for key, result in zip(keys, results, strict=True):
            if isinstance(result, BusError):
                log.info("lease not released: it will expire", key=key, error=str(result))
            elif isinstance(result, BaseException):
                raise result

    def drop_all(self) -> None:
        """Every worker's sequences count for nothing any more; leases that are still ours are adopted anew."""
        for worker_id, worker in self._workers.items():
            self._core().worker_lost(worker_id, self._clock(), LossCause.HANDED_OVER)
            worker.last_epoch = 0
            if worker.link is not None:
                worker.link.broken = "everything was dropped"

    def _on_snapshot(self, worker: _Worker, snapshot: Snapshot, now: float) -> None:
        link = worker.link
        sequences = link.on_snapshot(snapshot, now) if link is not None else None
        if link is None or sequences is None:
            return
        hello = worker.hello
        adoption = self._core().add_worker(snapshot.worker, facts_of(hello), sequences, now, reads_logs=True)
        apply_hello(self._core(), hello, now, accepting=self._may_accept(hello))
        worker.last_epoch = link.epoch
        worker.num_failures = 0
        log.info("worker adopted", worker=snapshot.worker, epoch=link.epoch, num_sequences=len(sequences))
        self._on_adoption(snapshot.worker, adoption, sequences)
        self._wake()

    def _tick(self) -> None:
        now = self._clock()
        frozen = now - self._ticked_at > SILENCE_S / 2
        self._ticked_at = now
        if not self._bus.is_connected:
            self._connected_since = None
            return
        if self._connected_since is None or frozen:
            # What was said meanwhile is lost, or still to be read.
            self._connected_since = now
        for worker_id, worker in list(self._workers.items()):
            silent_for_s = now - max(worker.heard_at, self._connected_since)
            if silent_for_s > SILENCE_S and worker.hello.state is not WorkerState.LEAVING:
                self._lose(worker_id, "it is silent", LossCause.VANISHED)
                worker.free_since = None
            if worker.link is not None:
                worker.link.tick(now)
                if worker.link is not None and worker.link.broken is not None:
                    self._break(worker_id, worker, now)

    def _break(self, worker_id: WorkerId, worker: _Worker, now: float) -> None:
        """The next lease, with a higher epoch, repairs whatever is wrong."""
        assert worker.link is not None
        worker.num_failures += 1
        doubled_s = min(0.1 * 2 ** min(worker.num_failures, 16), MAX_ADOPTION_DELAY_S)
        delay_s = 0.0 if worker.num_failures == 1 else doubled_s
        worker.adopt_at = now + delay_s
        log.warning("adopting again", worker=worker_id, epoch=worker.link.epoch, reason=worker.link.broken)
        worker.link = None
        worker.free_since = now - COURTESY_S

    def _lose(self, worker_id: WorkerId, reason: str, cause: LossCause) -> None:
        worker = self._workers[worker_id]
        if worker.link is None and not worker.last_epoch:
            return
        log.warning("worker lost", worker=worker_id, reason=reason)
        worker.link = None
        worker.last_epoch = 0
        self._on_dropped(self._core().worker_lost(worker_id, self._clock(), cause, reason, reads_logs=True))
        self._wake()

    async def _drop_dead(self) -> None:
        """Leases of workers that are gone: given up at once, forgotten later: one that only stalled needs its epoch."""
        now = self._clock()
        for worker_id, worker in list(self._workers.items()):
            key = worker_lease_key(worker_id)
            silent_for_s = now - max(worker.heard_at, self._connected_since or now)
            is_gone = silent_for_s > SILENCE_S or worker.hello.state in (WorkerState.LEAVING, WorkerState.PARKED)
            if is_gone and key in self._leases.held:
                await self._leases.release(key)
            elif silent_for_s > FORGET_S:
                await self._leases.forget(key)
                del self._workers[worker_id]

    async def _lease_free(self) -> None:
        workers = list(self._workers.items())
        random.shuffle(workers)  # so that schedulers rarely reach for the same one
        for worker_id, worker in workers:
            # Asked again for each one: the last that was taken may have been the last of our share.
            if self._wants(worker_id, worker, self._clock()):
                await self._take(worker_id, worker)

    async def _balance(self) -> None:
        """Gives a worker away if we hold more than our share while peers live."""
        links = {key: worker.link for key, worker in self._workers.items() if worker.link and worker.link.is_active}
        worker_id = self._handover.step(links, self._fair_share(self._clock()), self._clock())
        if worker_id is None:
            return
        log.info("worker handed over", worker=worker_id)
        worker = self._workers[worker_id]
        worker.link = None
        worker.last_epoch = 0
        worker.free_since = None
        await self._leases.release(worker_lease_key(worker_id))

    def _may_accept(self, hello: Hello) -> bool:
        return hello.state is WorkerState.READY and not self._handover.is_chosen(hello.worker)

    def _is_ready(self, worker: _Worker) -> bool:
        return worker.hello.state is WorkerState.READY and self._clock() - worker.heard_at <= SILENCE_S

    def _fair_share(self, now: float) -> int:
        num_present = sum(
            now - known.heard_at <= SILENCE_S and known.hello.state is not WorkerState.PARKED
            for known in self._workers.values()
        )
        return math.ceil(num_present / max(1, self._num_schedulers()))

    def _wants(self, worker_id: WorkerId, worker: _Worker, now: float) -> bool:
        key = worker_lease_key(worker_id)
        if worker.link is not None or worker.hello.state not in (WorkerState.READY, WorkerState.DRAINING):
            return False
        if now - worker.heard_at > SILENCE_S or now < worker.adopt_at:
            return False
        if key in self._leases.held:
            return True  # still ours, but it needs a new epoch
        if not self._leases.is_free(key):
            observed = self._leases.observed(key)
            if observed is not None and worker.last_epoch and observed.record.epoch > worker.last_epoch:
                if observed.record.holder == self._id:
                    worker.last_epoch = observed.record.epoch  # taken without hearing of it
                else:
                    self._on_usurped(f"{observed.record.holder} has taken {worker_id}")
            if observed is not None and observed.record.holder != self._id:
                worker.free_since = None
            return False
        if worker.free_since is None:
            worker.free_since = now
        observed = self._leases.observed(key)
        former = observed.record.holder if observed is not None else ""
        if former == self._id and worker.last_epoch:
            return True  # it expired, but we know what is on it
        if former and former != self._id:
            if not self._is_present(former):
                return True  # it is dead: the sequences must not wait for fairness
            if now - worker.free_since < DEFERENCE_S:
                return False
        return self.num_leased < self._fair_share(now) or now - worker.free_since >= COURTESY_S

    async def _take(self, worker_id: WorkerId, worker: _Worker) -> None:
        key = worker_lease_key(worker_id)
        if key in self._leases.held:
            await self._leases.release(key)
        lease = await self._leases.acquire(key, least_epoch(worker.hello))
        if lease is None:
            return
        if self._is_closing:
            await self._leases.release(key)
            return
        if worker.last_epoch:
            if lease.epoch != worker.last_epoch + 1:
                self._on_usurped(f"somebody had {worker_id} meanwhile")
            else:
                worker.last_epoch = lease.epoch
        worker.free_since = None
        worker.link = WorkerLink(
            worker_id,
            self._id,
            lease.epoch,
            lambda subject, data: self._bus.publish(subject, data),
            self._bus.max_payload,
            self._clock(),
        )
