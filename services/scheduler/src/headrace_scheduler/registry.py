"""The requests we own and what becomes of their choices.

Every change of a sequence's state passes through here, so that the waiting list, the ledgers and the requests agree,
and each request ends exactly once (I2).
"""

from collections import OrderedDict

from headrace_scheduler.decisions import EndedRequest
from headrace_scheduler.fairness import Shares
from headrace_scheduler.sequence import OwnedRequest, Sequence, SequenceState
from headrace_scheduler.stay import Stay
from headrace_scheduler.waiting import WaitingList
from headrace_shared.messages import Outcome, Request, RequestEnded, RequestId
from headrace_shared.record_messages import DeadRequest

MAX_REMEMBERED = 16_384
"""Ended requests that are recognised in a late snapshot or redelivery: more than end within a lease or an ack wait."""


class Registry:
    __slots__ = (
        "_arrivals",
        "_remembered",
        "ended",
        "may_admit",
        "now",
        "num_unplaced",
        "requests",
        "shares",
        "waiting",
    )

    def __init__(self) -> None:
        self.requests: dict[RequestId, OwnedRequest] = {}
        self.waiting = WaitingList()
        self.shares = Shares()
        self.ended: list[EndedRequest] = []
        """Not yet handed out."""
        self.may_admit = False
        """Something has changed since the last attempt to admit."""
        self.num_unplaced = 0
        """Open sequences that are not on a worker."""
        self.now = 0.0
        """Of the event that is dealt with: monotonic seconds."""
        self._arrivals = 0
        self._remembered: OrderedDict[RequestId, None] = OrderedDict()

    def has_ended(self, request_id: RequestId) -> bool:
        """Ended here not long ago."""
        return request_id in self._remembered

    def own(self, request: Request, ack_subject: str, stream_sequence: int, base_attempt: int) -> OwnedRequest:
        """A new request, with all choices UNKNOWN."""
        self._arrivals += 1
        share = self.shares.open(request)
        owned = OwnedRequest(request, ack_subject, stream_sequence, self._arrivals, base_attempt, share)
        self.requests[request.request_id] = owned
        self.num_unplaced += owned.num_open
        return owned

    def wait(self, sequence: Sequence) -> None:
        """To the waiting list: an unknown or parked sequence, or a running one whose stay is over."""
        share = sequence.request.share
        if sequence.state is SequenceState.RUNNING:
            self.num_unplaced += 1
            self.shares.run_no_more(share, sequence.level)
        sequence.to(SequenceState.WAITING)
        self.shares.wait(share)
        sequence.waiting_since = sequence.at_level_since = self.now
        self.waiting.add(sequence)
        self.may_admit = True

    def park(self, sequence: Sequence) -> None:
        was_waiting = sequence.state is SequenceState.WAITING
        sequence.to(SequenceState.PARKED)
        if was_waiting:
            self.waiting.remove(sequence)
            self.shares.wait_no_more(sequence.request.share)

    def run(self, sequence: Sequence, stay: Stay, attempt: int) -> None:
        """The sequence, not running so far, is on a worker now."""
        was_waiting = sequence.state is SequenceState.WAITING
        sequence.to(SequenceState.RUNNING)
        self.num_unplaced -= 1
        self.shares.run(sequence.request.share, sequence.level)
        if was_waiting:
            self.waiting.remove(sequence)
            self.shares.wait_no_more(sequence.request.share)
        self.detach(sequence)
        sequence.stay = stay
        sequence.begin_attempt(attempt)

    def leave(self, sequence: Sequence) -> None:
        """A running sequence lost its stay, which has been stopped: it waits again, and so may its siblings."""
        self.wait(sequence)
        self.unpark(sequence.request)

    def lose(self, sequence: Sequence) -> None:
        """The worker of a sequence that runs, or was to leave it, is gone: only the log knows how far it had got."""
        share = sequence.request.share
        if sequence.state is SequenceState.RUNNING:
            self.num_unplaced += 1
            self.shares.run_no_more(share, sequence.level)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self.shares.wait_no_more(share)
        sequence.to(SequenceState.UNKNOWN)

    def detach(self, sequence: Sequence) -> None:
        """The latest stay's progress is of no interest any more."""
        if sequence.stay is not None:
            sequence.stay.sequence = None
            sequence.stay = None

    def unpark(self, request: OwnedRequest) -> None:
        """Siblings stop waiting for the prompt when it is computed, or when nobody is about to compute it."""
        parked = request.in_state(SequenceState.PARKED)
        if not parked:
            return
        running = request.in_state(SequenceState.RUNNING)
        if any(is_prompt_computed(sequence) for sequence in running):
            for sequence in parked:
                self.wait(sequence)
        elif not running and not request.in_state(SequenceState.WAITING):
            self.wait(parked[0])

    def end(self, sequence: Sequence, outcome: Outcome, *, tell: bool = True) -> None:
        """Ends one choice, and the request with its last one. `tell`: its worker does not know yet."""
        if sequence.state is SequenceState.RUNNING:
            stay = sequence.stay
            assert stay is not None, sequence.order
            stay.ledger.stop(stay, tell=tell)
            self.shares.run_no_more(sequence.request.share, sequence.level)
            self.may_admit = True
        else:
            self.num_unplaced -= 1
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self.shares.wait_no_more(sequence.request.share)
            self.may_admit = True
        sequence.to(SequenceState.ENDED)
        sequence.outcome = outcome
        self.detach(sequence)
        request = sequence.request
        request.num_open -= 1
        self.shares.close(request.share)
        if request.num_open == 0:
            self._close(request)
        else:
            self.unpark(request)

    def end_all(self, request: OwnedRequest, outcome: Outcome) -> None:
        """Ends all open choices, and with them the request."""
        # Parked ones first, so that none is woken by the end of its sibling only to end as well.
        for state in (SequenceState.PARKED, SequenceState.UNKNOWN, SequenceState.WAITING, SequenceState.RUNNING):
            for sequence in request.in_state(state):
                self.end(sequence, outcome)

    def fail(self, request: OwnedRequest, code: str, message: str, detail: str = "") -> None:
        request.code, request.message, request.detail = code, message, detail
        self.end_all(request, Outcome.FAILED)

    def quarantine(self, request: OwnedRequest, code: str, message: str, detail: str) -> None:
        """Fails a request for good: it is kept for an operator."""
        request.is_dead = True
        self.fail(request, code, message, detail)

    def forget(self, request_id: RequestId) -> EndedRequest | None:
        """Drops a request without a terminal event. Returns the event that will not be."""
        request = self.requests.get(request_id)
        if request is not None:
            self.end_all(request, Outcome.CANCELLED)
        position = self._find_pending(request_id)
        return None if position is None else self.ended.pop(position)

    def let_go(self, request_id: RequestId) -> None:
        """Drops a request that somebody else goes on with. Should it come back, it must run: it has not ended."""
        if self.forget(request_id) is not None:
            self._remembered.pop(request_id, None)

    def replace_pending_ack(self, request_id: RequestId, ack_subject: str) -> bool:
        """A message was delivered again between the end of its request and the event. False if no event is pending."""
        position = self._find_pending(request_id)
        if position is None:
            return False
        self.ended[position] = self.ended[position]._replace(ack_subject=ack_subject)
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError where states, lists and counts disagree."""
        self.waiting.check_integrity()
        self.shares.check_integrity()
        waiting = {id(sequence) for sequence in self.waiting}
        num_unplaced = 0
        for request in self.requests.values():
            num_open = 0
            for sequence in request.sequences:
                state = sequence.state
                assert (id(sequence) in waiting) == (state is SequenceState.WAITING), (sequence.order, state)
                waiting.discard(id(sequence))
                num_open += state is not SequenceState.ENDED
                num_unplaced += state not in (SequenceState.ENDED, SequenceState.RUNNING)
                assert (sequence.outcome is None) == (state is not SequenceState.ENDED), (sequence.order, state)
                if state is SequenceState.RUNNING:
                    stay = sequence.stay
                    assert stay is not None and stay.sequence_id in stay.ledger.running, sequence.order
            assert request.num_open == num_open > 0, (request.request.request_id, request.num_open, num_open)
            active = request.in_state(SequenceState.RUNNING) + request.in_state(SequenceState.WAITING)
            assert active or not request.in_state(SequenceState.PARKED), (request.request.request_id, "all parked")
        assert not waiting, "a sequence waits whose request is not ours"
        assert num_unplaced == self.num_unplaced, (num_unplaced, self.num_unplaced)
        assert len(self._remembered) <= MAX_REMEMBERED, len(self._remembered)

    def _find_pending(self, request_id: RequestId) -> int | None:
        return next((i for i, ended in enumerate(self.ended) if ended.event.request_id == request_id), None)

    def _close(self, request: OwnedRequest) -> None:
        outcome = request.outcome()
        request_id = request.request.request_id
        event = RequestEnded(request_id=request_id, outcome=outcome, code=request.code, message=request.message)
        dead = _dead(request) if request.is_dead else None
        ended = EndedRequest(
            event, request.request.router, request.ack_subject, request.stream_sequence, request.detail, dead
        )
        self.ended.append(ended)
        del self.requests[request_id]
        self._remembered[request_id] = None
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)


def _dead(owned: OwnedRequest) -> DeadRequest:
    request = owned.request
    return DeadRequest(
        request_id=request.request_id,
        router=request.router,
        model=request.model,
        reason=owned.detail,
        num_prompt_tokens=owned.prompt_length,
        num_output_tokens=owned.num_generated,
        num_choices=request.num_choices,
        max_tokens=request.stop.max_tokens,
        lane=request.lane,
        tenant=request.tenant,
        losses=owned.loss_reasons,
        request=request,
    )


def is_prompt_computed(sequence: Sequence) -> bool:
    """The sequence runs, and its blocks hold the whole prompt."""
    stay = sequence.stay
    return (
        sequence.state is SequenceState.RUNNING
        and stay is not None
        and stay.num_computed >= sequence.request.prompt_length
    )
