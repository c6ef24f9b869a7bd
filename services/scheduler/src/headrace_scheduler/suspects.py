"""Requests that workers may die of, and their trial: alone on a worker, for as long as it takes to know.

A death implicates everybody who was on board. Nobody is given up for that: a suspect runs by itself, and only who loses
its worker there is given up. Whoever gets past the place where the worker died is acquitted and joins the others again;
and so does, untried, whoever was suspected for deaths that a conviction explains.
A poison request thus costs two workers, and its batch-mates a moment.

    innocent ── losses weigh SUSPECT_AT ──> suspect ── recorded ──> on trial ──┬── worker lost ──> given up
        ^                                                                     │
        └───────────── MARGIN_TOKENS beyond where it was, or finished ─────────┘

An engine that fails weighs as much as SUSPECT_AT workers that vanish: what kills a whole machine without a word is
rarely a request, and where machines die often, nobody's batch is to spend its time on trials, nor to be given up for
them.
"""

from collections.abc import Iterable, Mapping

from headrace_scheduler.decisions import LossCause
from headrace_scheduler.ledger import WorkerLedger
from headrace_scheduler.registry import Registry
from headrace_scheduler.sequence import SUSPECT_AT, OwnedRequest, Sequence, SequenceState
from headrace_scheduler.stay import Stay
from headrace_shared.messages import RequestId, WorkerId
from headrace_shared.record_messages import LossRecord

WEIGHTS: Mapping[LossCause, int] = {LossCause.HANDED_OVER: 0, LossCause.VANISHED: 1, LossCause.FAILED: SUSPECT_AT}
MARGIN_TOKENS = 16
"""Beyond what we knew of when the worker died: it may have been some iterations further. Grows with each acquittal, so
that a request which kills at a later place each time is not acquitted for ever."""
MARGIN_GROWTH = 16
MAX_REASONS = 4
QUARANTINED = "request_quarantined"
"""Error code of requests that were given up."""
MESSAGE = "The request was given up, because the workers that ran it failed."


class Suspects:
    """Knows which ledger is whose trial: `ledger.trial`, on which nobody else runs."""

    __slots__ = ("_max_losses", "_registry", "_workers", "records")

    def __init__(self, registry: Registry, workers: Mapping[WorkerId, WorkerLedger], max_losses: int) -> None:
        self._registry = registry
        self._workers = workers
        self._max_losses = max_losses
        self.records: list[tuple[RequestId, LossRecord]] = []
        """Not yet handed out."""

    def lost(
        self,
        worker_id: WorkerId,
        ledger: WorkerLedger,
        requests: Iterable[OwnedRequest],
        cause: LossCause,
        reason: str,
    ) -> None:
        """`requests` had something on a worker that is gone, if only in flight. `ledger` is its last state."""
        weight = WEIGHTS[cause]
        if not weight:
            return
        for request in requests:
            was_on_trial = ledger.trial is request
            request.num_losses += 1
            request.suspicion += weight
            request.suspected_in = (*request.suspected_in, worker_id)[-MAX_REASONS:]
            request.loss_reasons = (*request.loss_reasons, f"{worker_id}: {reason or cause.value}")[-MAX_REASONS:]
            if not request.num_open:
                continue
            if was_on_trial:
                detail = f"{request.num_losses} workers lost, the last one with nobody else: {request.loss_reasons[-1]}"
                self._registry.quarantine(request, QUARANTINED, MESSAGE, detail)
                self._explain(request)
            elif request.num_losses > self._max_losses:
                self._registry.quarantine(request, QUARANTINED, MESSAGE, f"{request.num_losses} losses, too many")
            else:
                request.is_recorded = not request.is_suspect
                self.set_goals(request)
                record = LossRecord(
                    num_losses=request.num_losses, suspicion=request.suspicion, reasons=request.loss_reasons
                )
                self.records.append((request.request.request_id, record))

    def recall(self, request: OwnedRequest, record: LossRecord) -> None:
        """What is known of an earlier owner's time."""
        request.num_losses = max(request.num_losses, record.num_losses)
        request.suspicion = max(request.suspicion, record.suspicion)
        request.loss_reasons = request.loss_reasons or record.reasons[-MAX_REASONS:]

    def set_goals(self, request: OwnedRequest) -> None:
        margin = MARGIN_TOKENS * MARGIN_GROWTH ** min(request.num_acquittals, 4)
        for sequence in request.sequences:
            sequence.goal = len(sequence.output) + margin

    def adopted(self, ledger: WorkerLedger) -> None:
        """A suspect that our predecessor had by itself stays so."""
        request = next((sequence.request for _, sequence in _running(ledger)), None)
        if request is not None and request.is_suspect and _is_alone(ledger, request):
            ledger.trial = request
            self.set_goals(request)

    def assign(self) -> list[Stay]:
        """Picks workers for trials. Returns the running stays that must make room there."""
        registry = self._registry
        for ledger in self._workers.values():
            trial = ledger.trial
            is_over = trial is not None and not (trial.num_open and trial.is_suspect)
            if is_over or (not ledger.accepting and not ledger.running):
                ledger.trial = None
        assigned = {id(ledger.trial) for ledger in self._workers.values() if ledger.trial is not None}
        waiting = {id(s.request): s.request for s in registry.waiting if s.request.is_suspect}
        suspects = [request for key, request in waiting.items() if request.is_recorded and key not in assigned]
        num_left = max(1, sum(ledger.accepting for ledger in self._workers.values()) // 2) - len(assigned)
        # Most poison acts early: whoever got least far is the likeliest, and its conviction spares the others a trial.
        suspects.sort(key=lambda request: (request.num_generated, request.stream_sequence, request.arrival))
        cleared: list[Stay] = []
        for request in suspects[: max(0, num_left)]:
            able = [
                (bool(ledger.stays), len(ledger.running), worker_id)
                for worker_id, ledger in self._workers.items()
                if ledger.accepting and ledger.trial is None and ledger.can_take(request)
            ]
            if not able:
                continue
            ledger = self._workers[min(able)[2]]
            ledger.trial = request
            cleared += [stay for stay, sequence in _running(ledger) if sequence.request is not request]
        return cleared

    def place_of(self, request: OwnedRequest) -> WorkerId | None:
        """The worker that is the request's own by now; None while it has none, or others are still on it."""
        for worker_id, ledger in self._workers.items():
            if ledger.trial is request:
                return worker_id if _is_alone(ledger, request) else None
        return None

    def review(self, ledger: WorkerLedger) -> None:
        """After progress of a worker with a trial: ends the trial once there is nothing more to learn."""
        request = ledger.trial
        assert request is not None
        still = [s for s in request.sequences if s.state is not SequenceState.ENDED and len(s.output) < s.goal]
        if still:
            return
        request.suspicion = 0
        request.suspected_in = ()
        request.num_acquittals += 1
        ledger.trial = None
        self._registry.may_admit = True

    def _explain(self, culprit: OwnedRequest) -> None:
        """Others who were suspected for the same deaths need no trial. Should one of them be a second culprit, it has
        killed nobody yet."""
        explained = set(culprit.suspected_in)
        for request in self._registry.requests.values():
            if request.suspected_in and explained.issuperset(request.suspected_in):
                request.suspicion = 0
                request.suspected_in = ()
        self._registry.may_admit = True


def _running(ledger: WorkerLedger) -> list[tuple[Stay, Sequence]]:
    return [(stay, stay.sequence) for stay in ledger.running.values() if stay.sequence is not None]


def _is_alone(ledger: WorkerLedger, request: OwnedRequest) -> bool:
    """Nobody else has an iteration in flight either."""
    return all(stay.sequence is not None and stay.sequence.request is request for stay in ledger.stays.values())
