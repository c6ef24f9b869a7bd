"""The scheduler process around the pure core: queue in, credit out, progress in, terminal events out.

It owns whatever it holds only as long as no peer has taken a lease of it and its messages are not offered again. Once
that may have happened it forgets everything and starts anew from leases, snapshots and queue, like its own successor.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from headrace_scheduler.backlog_watch import BacklogWatch
from headrace_scheduler.broker_clock import BrokerClock
from headrace_scheduler.cancellations import Cancellations
from headrace_scheduler.decisions import Adoption, Decisions, EndedRequest, SchedulerConfig
from headrace_scheduler.drains import Drains
from headrace_scheduler.endings import Endings
from headrace_scheduler.fleet import Fleet
from headrace_scheduler.flight_log import FlightLog
from headrace_scheduler.flows import Flows
from headrace_scheduler.intake import PULL_S, Intake
from headrace_scheduler.lifetimes import Lifetimes
from headrace_scheduler.look_back import LookBack
from headrace_scheduler.losses import Losses
from headrace_scheduler.peers import Peers
from headrace_scheduler.placements import Placements
from headrace_scheduler.reporting import Reporting
from headrace_scheduler.request_traces import RequestTraces
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.sequence import SequenceState
from headrace_scheduler.settings import SchedulerSettings
from headrace_scheduler.storyteller import Storyteller
from headrace_scheduler.stream_watch import StreamWatch
from headrace_scheduler.trace_ids import TraceIds
from headrace_shared.backlog import lane_depths
from headrace_shared.beats import beat
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.leases import Leases
from headrace_shared.messages import Cancel, RequestId, SchedulerId, SequenceSnapshot, WorkerId
from headrace_shared.model_cards import served_name
from headrace_shared.provisioning import provision
from headrace_shared.service import Service
from headrace_shared.subjects import (
    ACK_WAIT_S,
    LEASES,
    REQUESTS,
    all_hellos_of,
    progress_subject,
    requests_stream,
)

SIGN_OF_LIFE_S = 0.75
OWNERSHIP_S = ACK_WAIT_S - SIGN_OF_LIFE_S - 0.25
"""Cut off or frozen for longer, our messages may be offered to others before we can say that we live."""
STRANDED_S = PULL_S
"""Without any worker for so long, what we hold is left to peers that have some: by then no pull of ours takes it again.
"""
STRANDED_CHECK_S = 0.1
ADOPTED_S = 1.0
"""By then a worker that was given up has been adopted by a peer, if there is one."""
RETRY_S = 0.5
SETTLE_S = 3.0

log = structlog.get_logger(__name__)


class SchedulerService:
    """One scheduler process on a connected bus. `run` returns when it has drained."""

    def __init__(
        self, service: Service, bus: Bus, settings: SchedulerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.service = service
        self._bus = bus
        self._settings = settings
        self._clock = clock
        self._model = settings.served_name or served_name(settings.model)
        self._config = SchedulerConfig(
            horizon_blocks=settings.horizon_blocks,
            prefix_caching=settings.prefix_caching,
            max_waiting=settings.max_waiting,
            max_losses=settings.max_losses,
        )
        scheduler_id = SchedulerId(service.id)
        self._flight = FlightLog(bus, scheduler_id, clock) if settings.flight_recorder else None
        self.core = self._new_core()
        self._placed: set[RequestId] = set()
        """Requests that have been on a worker: whoever adopts it will know them."""
        self._wake = asyncio.Event()
        self._reconnected = asyncio.Event()
        self._alive_at = clock()
        self._leases = Leases(bus, LEASES.name, scheduler_id, clock)
        self._peers = Peers(scheduler_id, self._model, clock)
        self._trace_ids = TraceIds()
        service.find_trace_id = self._trace_ids.find
        self._traces = RequestTraces(service.tracing, scheduler_id, clock) if service.tracing is not None else None
        self._endings = Endings(bus, keep_dead_prompts=settings.dead_prompts, on_settled=self._on_settled)
        self._losses = Losses(bus, self._on_loss_stored)
        broker_clock = BrokerClock(bus, REQUESTS, clock)
        self._cancellations = Cancellations(bus, self._cancel, broker_clock.now)
        self._lifetimes = Lifetimes(
            bus,
            broker_clock,
            settings.reattach_timeout_s,
            cancel=lambda request_id, reason: self._cancel(Cancel(request_id=request_id, reason=reason)),
            held=lambda: (request_id for request_id, _ in self.core.ack_subjects()),
            clock=clock,
        )
        self._look_back = LookBack(bus, self._get_core, on_ended=self._on_found_ended, wake=self._wake.set, clock=clock)
        self.fleet = Fleet(
            self._get_core,
            bus,
            self._leases,
            scheduler_id,
            clock=clock,
            wake=self._wake.set,
            on_adoption=self._on_adoption,
            on_dropped=lambda dropped: self._look_back.ask(dropped, are_new=False),
            on_usurped=self._start_anew,
            num_schedulers=lambda: self._peers.num_schedulers,
            is_present=self._peers.is_present,
        )
        self._drains = Drains(
            self._get_core, self.fleet, self._num_queued, settings.move_after_s, self._wake.set, clock
        )
        self._intake = Intake(
            bus,
            self._model,
            self._get_core,
            self._endings,
            self._cancellations,
            self._losses,
            self._lifetimes,
            max_deliveries=settings.max_deliveries,
            may_pull=lambda: self.fleet.has_active,
            own_id=scheduler_id,
            peers=lambda: self._peers.with_workers,
            wake=self._wake.set,
            clock=clock,
            traces=self._traces,
            note=self._trace_ids.note,
        )
        self._flows = Flows(bus, self._model, self._intake.serve)
        self._backlog = BacklogWatch(bus, self._model, service.metrics, lambda: self._peers.is_first)
        self._reporting = Reporting(service, self._model, self._endings, self._intake, self._backlog)
        self._placements = Placements(bus, self._reporting, self._traces, broker_clock.age_s)

    async def run(self) -> None:
        """Raises BusError if the broker does not get ready within its time limits."""
        await self._set_up()
        service = self.service
        service.spawn(self._leases.keep(self.fleet.on_lease_lost), "leases")
        service.spawn(self.fleet.run(), "fleet")
        service.spawn(self._drains.run(), "drains")
        service.spawn(self._endings.run(), "endings")
        service.spawn(self._cancellations.run(), "tombstones")
        service.spawn(self._lifetimes.run(), "lifetimes")
        service.spawn(self._losses.run(), "losses")
        service.spawn(self._look_back.run(), "look-back")
        service.spawn(self._backlog.run(), "backlog")
        if self._flight is not None:
            service.spawn(self._flight.run(), "flight-log")
            service.spawn(Storyteller(self._bus, SchedulerId(service.id)).run(), "stories")
        service.spawn(self._schedule(), "passes")
        service.spawn(self._show_life(), "signs-of-life")
        service.spawn(self._watch(), "watch")
        service.spawn(self._watch_for_workers(), "watch-for-workers")
        service.spawn(self._resume(), "resume")
        service.spawn(StreamWatch(self._bus, lambda: self._peers.is_first, self._reconnected.set).run(), "stream-watch")
        service.spawn(self._flows.run(), "flows")
        intake = service.spawn(self._intake.run(), "intake")
        state = self._state
        service.spawn(service.report(self._bus, state, self._reporting.gauges, self._model), "telemetry")
        service.set_ready(lambda: None if self._bus.is_connected else "no connection to the broker")
        log.info("ready", model=self._model)
        await service.draining.wait()
        await self._leave(intake)

    async def _set_up(self) -> None:
        await self._provision()
        if self._flight is not None:
            await self._flight.open()
        await self._leases.open()
        await self._lifetimes.open()  # first: it learns the broker's time
        await self._cancellations.open()
        await self._peers.open(self._bus)
        await self._flows.open()
        await self._bus.subscribe(progress_subject(SchedulerId(self.service.id)), self.fleet.on_report)
        await self._bus.subscribe(all_hellos_of(self._model), self.fleet.on_hello)
        self._bus.on_reconnect(self._reconnected.set)

    async def _provision(self) -> None:
        settings = self._settings
        await provision(self._bus, requests_stream(settings.queue_max_messages, settings.queue_max_bytes))

    async def _leave(self, intake: "asyncio.Task[None]") -> None:
        """What waits goes back to the queue; the workers run on within their horizons until a peer adopts them."""
        self._intake.stop()
        await asyncio.wait((intake,))
        # First the leases: once a request is given back, no pass may place it any more.
        await self.fleet.release_all()
        self._give_back()
        await self._endings.settle(SETTLE_S)
        if self._flight is not None:
            self._flight.close()

    async def _schedule(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            began_at = self._clock()
            self._carry_out(self.core.schedule(began_at))
            self._intake.on_pass()
            # Passes take half of the time at most: what happens meanwhile is dealt with together.
            await asyncio.sleep(self._clock() - began_at)

    def _carry_out(self, decisions: Decisions) -> None:
        now = self._clock()
        for worker_id, credit in decisions.credits.items():
            link = self.fleet.link(worker_id)
            if link is None:
                continue  # a snapshot is on its way, which voids this credit
            link.grant(credit, now)
            for admission in credit.admissions:
                self._placed.add(admission.request.request_id)
                self._placements.on_admission(self.core, worker_id, admission, now)
        for ended in decisions.ended:
            self._placed.discard(ended.event.request_id)
            if ended.detail:
                log.warning("request failed", request_id=ended.event.request_id, detail=ended.detail)
            self._reporting.count(ended)
            self._endings.end(ended)
        for request_id, record in decisions.losses:
            self._losses.store(request_id, record)

    async def _num_queued(self) -> int:
        """Requests that wait in the queue or with peers. Raises BusError."""
        depths = await lane_depths(self._bus, self._model)
        return sum(depth.num_pending for depth in depths.values()) + self._peers.num_waiting

    async def _show_life(self) -> None:
        """Keeps the queue from offering to others what we hold."""
        while True:
            if self._is_surely_owner():
                self._hold()
            await beat(SIGN_OF_LIFE_S)

    def _hold(self) -> None:
        for _, ack_subject in self.core.ack_subjects():
            self._bus.in_progress(ack_subject)
        for ack_subject in self._endings.ack_subjects():
            self._bus.in_progress(ack_subject)

    async def _watch(self) -> None:
        """Once a second: figures, engines that hang, and whether we ourselves were away for too long."""
        while True:
            now = self._clock()
            away_s = max(now - self._alive_at, self._bus.disconnected_for_s)
            if away_s > OWNERSHIP_S and next(self.core.ack_subjects(), None) is not None:
                self._start_anew(f"away for {away_s:.0f} s")
            self._alive_at = now
            gauges = self.core.gauges()
            self._reporting.update(gauges, self.core.oldest_wait_s(now))
            held = {request_id for request_id, _ in self.core.ack_subjects()}
            self._placed &= held  # some went to peers
            if self._traces is not None:
                self._traces.prune(held.union(self._endings.request_ids()))
            self.fleet.find_hangs({key: worker.num_runnable > 0 for key, worker in gauges.workers.items()})
            await beat(1.0)

    async def _watch_for_workers(self) -> None:
        """Notices that we have none, or none that takes anything, while peers do."""
        had_one_at = self._clock()
        while True:
            now = self._clock()
            have_peers_one = self._peers.have_workers
            if self.core.has_worker:  # it drains, or is about to be handed over
                have_peers_one = have_peers_one and self.fleet.could_leave
            if self.core.accepts or not have_peers_one:
                had_one_at = now
            elif now - had_one_at > STRANDED_S and self._is_surely_owner():
                self._leave_to_peers()
            await beat(STRANDED_CHECK_S)

    def _is_surely_owner(self) -> bool:
        """False after a freeze of ours, until `_watch` has drawn the consequences."""
        return self._clock() - self._alive_at <= OWNERSHIP_S

    def _start_anew(self, reason: str) -> None:
        log.warning("ownership lost: starting anew", reason=reason)
        # The broker would take it from a former owner too, and offer to a third what a second works on.
        if self._bus.is_connected and self._is_surely_owner():
            self._give_back()
        self.core = self._new_core()
        self._placed.clear()
        self.fleet.drop_all()

    def _leave_to_peers(self) -> None:
        """All that we hold waits for a worker, and workers may have gone to peers for good. A peer that takes a request
        from the queue continues it from the token log."""
        left = list(self.core.ack_subjects())
        if left:
            log.warning("no worker for them: requests go back to the queue", num_requests=len(left))
        for request_id, ack_subject in left:
            self.core.let_go(request_id)
            self._placed.discard(request_id)
            self._bus.give_back(ack_subject)

    def _give_back(self) -> None:
        """What no worker has is of no use here any more. Whoever adopts the worker that had it last may find it there
        all the same, as its release may not be confirmed, and says so before the delay is over."""
        for request_id, ack_subject in self.core.ack_subjects():
            request = self.core.request(request_id)
            if request_id not in self._placed:
                self._bus.give_back(ack_subject)
            elif request is not None and not request.in_state(SequenceState.RUNNING):
                self._bus.give_back(ack_subject, ADOPTED_S)

    async def _resume(self) -> None:
        """After each reconnect: a restarted broker has lost the streams in memory, and we may have missed messages."""
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            self._hold()
            try:
                await self._provision()
            except BusError as error:
                log.info("streams not ready yet", error=str(error))
                self._reconnected.set()
                await asyncio.sleep(RETRY_S)
                continue
            self._cancellations.on_reconnect(request_id for request_id, _ in self.core.ack_subjects())
            if self._flight is not None:
                await self._flight.open()

    def _on_adoption(self, worker_id: WorkerId, adoption: Adoption, snapshot: Sequence[SequenceSnapshot]) -> None:
        self._placed.update(adoption.adopted)
        self._reporting.adopted()
        if self._traces is not None:
            self._traces.adopted(worker_id, adoption, snapshot)
        for entry in snapshot:
            # At once: their former owner may have been silent for most of the ack wait.
            if entry.admission.request.request_id in adoption.adopted and entry.admission.ack_subject:
                self._bus.in_progress(entry.admission.ack_subject)
        self._cancellations.look_up(adoption.adopted)
        for entry in snapshot:
            self._trace_ids.note(entry.admission.request)
            published_at = self._bus.published_at(entry.admission.ack_subject)
            self._lifetimes.on_taken(entry.admission.request, published_at)
        self._look_back.ask(adoption.adopted, are_new=True)
        self._look_back.ask(adoption.dropped, are_new=False)

    async def _on_found_ended(self, request_id: RequestId, ack_subject: str) -> None:
        self._placed.discard(request_id)
        try:
            await self._endings.acknowledge(ack_subject)
        except BusError as error:
            log.info("not acknowledged: the queue will offer it again", error=str(error))

    def _cancel(self, cancel: Cancel) -> None:
        self.core.cancel(cancel.request_id, cancel.choice, cancel.reason, self._clock())
        self._wake.set()

    def _on_settled(self, ended: EndedRequest, took_s: float, is_settled: bool) -> None:
        if self._traces is not None:
            self._traces.settled(ended, took_s, is_settled)

    def _on_loss_stored(self, request_id: RequestId) -> None:
        self.core.recorded(request_id, self._clock())
        self._wake.set()

    def _new_core(self) -> Scheduler:
        core = Scheduler(self._config)
        if self._flight is not None:
            self._flight.attach(core)
        return core

    def _get_core(self) -> Scheduler:
        return self.core

    def _state(self) -> str:
        if self.service.draining.is_set():
            return "draining"
        return "ready" if self.fleet.has_active else "waiting for a worker"
