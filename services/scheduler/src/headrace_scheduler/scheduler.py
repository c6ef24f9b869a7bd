"""The scheduler's pure core: events in, decisions out. No I/O, clock, randomness or environment; time is an argument.

The shell calls the event methods as things happen and `schedule` after each batch of events, then sends what that
returns. Each event method leaves every structure consistent (`check_integrity`), and none raises for what may happen.
"""

from collections.abc import Collection, Iterator, Mapping

from headrace_scheduler.admission import Admitter
from headrace_scheduler.adoption import (
    abandon,
    aboard,
    adopt,
    affected,
    block_tables,
    conclude,
    is_self_contained,
    restore,
    unknown_of,
)
from headrace_scheduler.decisions import (
    OUTCOMES,
    AddResult,
    Adoption,
    ChoiceLog,
    Credit,
    Decisions,
    Gauges,
    LossCause,
    SchedulerConfig,
    WorkerFacts,
)
from headrace_scheduler.events import Observer, event
from headrace_scheduler.gauges import gauges_of
from headrace_scheduler.integrity import check_integrity
from headrace_scheduler.ledger import WorkerLedger
from headrace_scheduler.registry import Registry
from headrace_scheduler.sequence import OwnedRequest, SequenceState
from headrace_scheduler.stay import Stay
from headrace_scheduler.suspects import MESSAGE, QUARANTINED, Suspects
from headrace_shared.messages import (
    CancelReason,
    Progress,
    Request,
    RequestId,
    SequenceSnapshot,
    WorkerId,
)
from headrace_shared.record_messages import LossRecord

ATTEMPTS_PER_DELIVERY = 256
"""A redelivered message starts above all attempts of its earlier delivery (the token log knows exactly, if given)."""


class Scheduler:
    """All requests and leased workers of one model in one scheduler process. `now` is any monotonic time in seconds."""

    __slots__ = (
        "_admitter",
        "_config",
        "_num_losses",
        "_num_preemptions",
        "_registry",
        "_suspects",
        "_workers",
        "observer",
    )

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.observer: Observer | None = None
        self._config = config or SchedulerConfig()
        self._registry = Registry()
        self._workers: dict[WorkerId, WorkerLedger] = {}
        self._suspects = Suspects(self._registry, self._workers, self._config.max_losses)
        self._admitter = Admitter(self._registry, self._workers, self._suspects)
        self._num_preemptions = 0
        self._num_losses = 0

    @event
    def add_worker(
        self,
        worker_id: WorkerId,
        facts: WorkerFacts,
        snapshot: Collection[SequenceSnapshot],
        now: float,
        reads_logs: bool = False,
    ) -> Adoption:
        """A worker whose lease we hold, with all parts of its snapshot (empty if it holds nothing).

        Also for a known worker that was adopted again under a new epoch: the snapshot is the truth, credit that was
        decided for it but not yet fetched by `schedule` is void, and sequences that it does not hold are placed anew.
        `reads_logs`: as in `worker_lost`.
        """
        self._registry.now = now
        old = self._workers.pop(worker_id, None)
        config = self._config
        ledger = WorkerLedger(facts, config.horizon_blocks, config.prefix_caching, block_tables(snapshot))
        dropped = []
        if old is not None:
            dropped = abandon(self._registry, old, reads_logs=reads_logs)
            ledger.accepting, ledger.evacuates, ledger.adapters = old.accepting, old.evacuates, old.adapters
        self._workers[worker_id] = ledger
        new = adopt(self._registry, ledger, snapshot)
        self._suspects.adopted(ledger)
        self._admitter.see(item.admission.sequence_id for item in snapshot)
        for request in new:
            self._registry.unpark(request)
        self._registry.may_admit = True
        return Adoption(tuple(request.request.request_id for request in new), unknown_of(new), unknown_of(dropped))

    @event
    def worker_lost(
        self,
        worker_id: WorkerId,
        now: float,
        cause: LossCause = LossCause.VANISHED,
        reason: str = "",
        reads_logs: bool = False,
    ) -> tuple[RequestId, ...]:
        """Died, leaves, or its lease is gone. Its sequences wait again, with their output; with `reads_logs`, once
        `restore` has told what their users have got beyond that: returns whose log is to be read. Unknown: no-op."""
        self._registry.now = now
        ledger = self._workers.pop(worker_id, None)
        if ledger is None:
            return ()
        requests = affected(ledger)
        dropped = abandon(self._registry, ledger, reads_logs=reads_logs)
        self._num_losses += len(requests)
        self._suspects.lost(worker_id, ledger, requests, cause, reason)
        self._registry.may_admit = True
        return unknown_of(dropped)

    def can_hand_over(self, worker_id: WorkerId) -> bool:
        """Whether a peer would find all of the worker's requests in its snapshot and their logs: none of them runs on
        another worker of ours too, and no admission waits to be fetched."""
        ledger = self._workers.get(worker_id)
        return ledger is not None and not ledger.credit.admissions and is_self_contained(ledger)

    @event
    def hand_over(self, worker_id: WorkerId, now: float) -> bool:
        """Lets go of a worker and of its requests, without a terminal event: a peer adopts them. False if it cannot be
        (`can_hand_over`)."""
        if not self.can_hand_over(worker_id):
            return False
        self._registry.now = now
        ledger = self._workers.pop(worker_id)
        for request in aboard(ledger):
            self._registry.let_go(request.request.request_id)
        self._registry.may_admit = True
        return True

    @event
    def recorded(self, request_id: RequestId, now: float) -> None:
        """The loss that `Decisions` told of is stored. Unknown: no-op."""
        self._registry.now = now
        request = self._registry.requests.get(request_id)
        if request is not None:
            request.is_recorded = True
            self._registry.may_admit = True

    @event
    def set_accepting(self, worker_id: WorkerId, accepting: bool) -> None:
        """Whether the worker gets new sequences (false while it drains). Unknown: no-op."""
        ledger = self._workers.get(worker_id)
        if ledger is not None and ledger.accepting is not accepting:
            ledger.accepting = accepting
            ledger.evacuates = ledger.evacuates and not accepting
            self._registry.may_admit = True

    @event
    def set_adapters(self, worker_id: WorkerId, digests: tuple[str, ...]) -> None:
        """Which adapters the worker has loaded. What runs there is not touched. Unknown: no-op."""
        ledger = self._workers.get(worker_id)
        if ledger is not None and ledger.adapters != digests:
            ledger.adapters = digests
            self._registry.may_admit = True

    @event
    def evacuate(self, worker_id: WorkerId) -> None:
        """Its sequences move to others from now on, as places are found, until it accepts again. Unknown: no-op."""
        ledger = self._workers.get(worker_id)
        if ledger is not None and not ledger.accepting and not ledger.evacuates:
            ledger.evacuates = True
            self._registry.may_admit = True

    @event
    def add_request(
        self,
        request: Request,
        ack_subject: str,
        stream_sequence: int,
        num_delivered: int,
        now: float,
        logs: Mapping[int, ChoiceLog] | None = None,
        losses: LossRecord | None = None,
    ) -> AddResult:
        """A message of the queue. `logs` (by choice) is needed when `num_delivered` > 1: choices absent from it start
        afresh; and so is what is stored of its `losses`. For a known request its ack subject is replaced, and `logs`,
        if given, are taken as by `restore`. A Cancel that came earlier is not remembered here: look for its tombstone
        after this."""
        self._registry.now = now
        known = self._registry.requests.get(request.request_id)
        if known is not None:
            known.ack_subject = ack_subject
            if logs is not None:
                restore(self._registry, known, logs)
            return AddResult.KNOWN
        if self._registry.has_ended(request.request_id):
            is_pending = self._registry.replace_pending_ack(request.request_id, ack_subject)
            return AddResult.KNOWN if is_pending else AddResult.ENDED
        base_attempt = (max(1, num_delivered) - 1) * ATTEMPTS_PER_DELIVERY
        owned = self._registry.own(request, ack_subject, stream_sequence, base_attempt)
        if losses is not None:
            self._suspects.recall(owned, losses)
        restore(self._registry, owned, logs or {})
        self._suspects.set_goals(owned)
        return AddResult.ADDED

    @event
    def give_up(self, request_id: RequestId, reason: str, now: float) -> None:
        """Ends a request as one that is never to be tried again. Unknown: no-op."""
        self._registry.now = now
        request = self._registry.requests.get(request_id)
        if request is not None:
            self._registry.quarantine(request, QUARANTINED, MESSAGE, reason)

    @event
    def restore(self, request_id: RequestId, logs: Mapping[int, ChoiceLog], now: float) -> None:
        """Tells what the log knows of a request that was adopted, or has lost its worker. A choice whose log has a
        later attempt is placed anew (or has finished); unknown ones without a log go on with what is known."""
        self._registry.now = now
        request = self._registry.requests.get(request_id)
        if request is not None:
            restore(self._registry, request, logs)

    @event
    def forget(self, request_id: RequestId) -> tuple[str, int] | None:
        """Drops a request without a terminal event, since its log already has one. Returns ack subject and stream
        sequence if it was known, for the acknowledgement."""
        ended = self._registry.forget(request_id)
        return None if ended is None else (ended.ack_subject, ended.stream_sequence)

    @event
    def let_go(self, request_id: RequestId) -> None:
        """Drops a request that a peer goes on with: unlike a forgotten one, it has not ended. Unknown: no-op."""
        self._registry.let_go(request_id)

    @event
    def cancel(self, request_id: RequestId, choice: int | None, reason: CancelReason, now: float) -> None:
        """Ends a choice, or all that are open. Idempotent; unknown ids are no error."""
        self._registry.now = now
        request = self._registry.requests.get(request_id)
        if request is None:
            return
        if choice is None:
            self._registry.end_all(request, OUTCOMES[reason])
        elif 0 <= choice < len(request.sequences):
            sequence = request.sequences[choice]
            if sequence.state is not SequenceState.ENDED:
                self._registry.end(sequence, OUTCOMES[reason])

    @event
    def apply_progress(self, worker_id: WorkerId, progress: Progress, now: float) -> None:
        """Progress of the current epoch, in order of its numbers: the shell has checked both."""
        self._registry.now = now
        ledger = self._workers.get(worker_id)
        if ledger is None:
            return
        stays = ledger.stays
        for item in progress.sequences:
            stay = stays.get(item.sequence_id)
            if stay is None or stay.sequence is None:
                continue
            sequence = stay.sequence
            if item.tokens:
                sequence.output.extend(item.tokens)
                sequence.request.share.charge_output(len(item.tokens))
            before = stay.num_computed
            ledger.advance(stay, item.num_computed)
            request = sequence.request
            if item.finish is not None or item.error is not None:
                conclude(self._registry, sequence, item.error)
            elif request.prompt_length + len(sequence.output) >= stay.extend_at:
                ledger.note_short(stay)
            if before < request.prompt_length <= item.num_computed:
                self._registry.unpark(request)
        for sequence_id in progress.released:
            stay = stays.get(sequence_id)
            if stay is not None:
                self._confirm(ledger, stay)
        if ledger.trial is not None and ledger.running:
            self._suspects.review(ledger)

    def schedule(self, now: float) -> Decisions:
        """Extends, preempts and admits, and hands out all that was decided since the last call. Call it after each
        batch of events; a call without any costs next to nothing."""
        registry = self._registry
        registry.now = now
        for ledger in self._workers.values():
            if ledger.short:
                for stay in ledger.extend():
                    self._preempt(stay)
        if registry.waiting.promote(now) or registry.may_admit or self.is_overdue(now):
            registry.may_admit = True
            for stay in self._suspects.assign():
                self._make_way(stay)
            for ledger in self._workers.values():
                if ledger.evacuates:
                    self._admitter.move_from(ledger)
            self._admitter.admit()
        credits: dict[WorkerId, Credit] = {}
        for worker_id, ledger in self._workers.items():
            credit = ledger.take_credit()
            if credit is not None:
                credits[worker_id] = credit
        ended = registry.ended
        registry.ended = []
        losses = self._suspects.records
        self._suspects.records = []
        decisions = Decisions(credits, ended, losses)
        if self.observer is not None:
            self.observer.on_pass(now, decisions)
        return decisions

    def room(self) -> int:
        """How many more sequences (choices, not requests) intake may pull now. 0 without a worker."""
        window = sum(ledger.num_welcome() for ledger in self._workers.values() if ledger.accepting)
        return max(0, min(window, self._config.max_waiting) - self._registry.num_unplaced)

    @property
    def has_worker(self) -> bool:
        return bool(self._workers)

    def adapters_of(self, worker_id: WorkerId) -> tuple[str, ...] | None:
        """Digests; None for a worker that we do not have."""
        ledger = self._workers.get(worker_id)
        return None if ledger is None else ledger.adapters

    @property
    def accepts(self) -> bool:
        """Some worker takes new sequences."""
        return any(ledger.accepting for ledger in self._workers.values())

    def is_overdue(self, now: float) -> bool:
        """`schedule` would give somebody up."""
        return (at := self._admitter.gives_up_at) is not None and now >= at

    @property
    def num_waiting(self) -> int:
        """Sequences that are not on a worker."""
        return self._registry.num_unplaced

    def oldest_wait_s(self, now: float) -> float:
        """How long the sequence has waited that has waited longest for a worker; 0 if none does."""
        return max((now - sequence.waiting_since for sequence in self._registry.waiting), default=0.0)

    def request(self, request_id: RequestId) -> OwnedRequest | None:
        """What we own of that name, to look at."""
        return self._registry.requests.get(request_id)

    def ack_subjects(self) -> Iterator[tuple[RequestId, str]]:
        """Of all requests we own, for signs of life to the queue."""
        return ((request_id, request.ack_subject) for request_id, request in self._registry.requests.items())

    def gauges(self) -> Gauges:
        """Figures of now. Linear in the number of running sequences: for once a second."""
        num_preemptions = self._num_preemptions + self._admitter.num_displaced
        return gauges_of(self._registry, self._workers, self._admitter, num_preemptions, self._num_losses)

    def check_integrity(self) -> None:
        """Raises AssertionError, with the values, if any structure disagrees with another (I1). For tests and idle."""
        check_integrity(self._registry, self._workers, self._admitter.next_sequence_id)

    def _confirm(self, ledger: WorkerLedger, stay: Stay) -> None:
        sequence = stay.sequence
        if stay.sequence_id in ledger.running:
            # Nobody finished it: our predecessor had told the worker to stop it, before the snapshot that we adopted.
            assert sequence is not None, stay.sequence_id
            ledger.stop(stay, tell=False)
            self._registry.detach(sequence)
            self._registry.leave(sequence)
            self._num_losses += 1
        elif sequence is not None:
            self._registry.detach(sequence)
        ledger.confirm(stay)
        self._registry.may_admit = True

    def _preempt(self, stay: Stay) -> None:
        sequence = stay.sequence
        assert sequence is not None, stay.sequence_id
        self._num_preemptions += 1
        sequence.num_preemptions += 1
        self._registry.leave(sequence)

    def _make_way(self, stay: Stay) -> None:
        """As a preemption, but nobody's fault: it returns without having to leave more room."""
        sequence = stay.sequence
        assert sequence is not None, stay.sequence_id
        stay.ledger.stop(stay, tell=True)
        self._registry.leave(sequence)
