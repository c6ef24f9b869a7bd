"""Takes over what a worker's snapshot and the token log hold, and fits it into what we know (ARCHITECTURE.md, snapshot
rules). And the other way round: what goes with a worker that is handed over, and what a lost one leaves."""

from array import array
from collections.abc import Iterable, Mapping

from headrace_scheduler.decisions import ChoiceLog
from headrace_scheduler.ledger import WorkerLedger
from headrace_scheduler.registry import Registry
from headrace_scheduler.sequence import OwnedRequest, Sequence, SequenceState
from headrace_shared.codec import unpack_ids
from headrace_shared.errors import GRAMMAR_TOO_COMPLEX
from headrace_shared.messages import GRAMMAR_FAILED, BlockId, Outcome, RequestId, SequenceSnapshot

FAILED_MESSAGE = "The model could not go on with this request."
GRAMMAR_MESSAGE = "The form that the answer must have became too complex to be followed any further."


def block_tables(snapshot: Iterable[SequenceSnapshot]) -> list[list[BlockId]]:
    """Of all sequences that still hold their blocks."""
    return [list(item.admission.block_ids) for item in snapshot if not item.released]


def adopt(registry: Registry, ledger: WorkerLedger, snapshot: Iterable[SequenceSnapshot]) -> list[OwnedRequest]:
    """Takes over every sequence of the snapshot, into a ledger made with its block tables. Returns new requests.

    If the snapshot holds two stays of one choice, or one that runs elsewhere too, the later attempt is the one that
    routers listen to; the other is released.
    """
    new: list[OwnedRequest] = []
    for item in sorted(snapshot, key=lambda item: item.admission.attempt):
        admission = item.admission
        request_id = admission.request.request_id
        request = registry.requests.get(request_id)
        if request is None and not registry.has_ended(request_id):
            request = registry.own(admission.request, admission.ack_subject, admission.stream_sequence, 0)
            request.num_losses, request.suspicion = admission.num_losses, admission.suspicion
            new.append(request)
        wanted = request is not None and _wants(request.sequences[admission.choice], admission.attempt)
        if request is None or not wanted:
            _drop(ledger, item)
            continue
        sequence = request.sequences[admission.choice]
        _take(registry, ledger, item, sequence)
    return new


def _wants(sequence: Sequence, attempt: int) -> bool:
    if sequence.state is SequenceState.ENDED:
        return False
    if sequence.last_attempt is None:
        return True
    if sequence.state is SequenceState.RUNNING:
        return attempt > sequence.last_attempt
    return attempt >= sequence.last_attempt


def _drop(ledger: WorkerLedger, item: SequenceSnapshot) -> None:
    if item.released:
        return
    ledger.restore(item.admission.sequence_id, None, list(item.admission.block_ids), 0)
    if item.finish is None and item.error is None:
        ledger.credit.releases.append(item.admission.sequence_id)


def _take(registry: Registry, ledger: WorkerLedger, item: SequenceSnapshot, sequence: Sequence) -> None:
    admission = item.admission
    if sequence.state is SequenceState.RUNNING:
        stay = sequence.stay
        assert stay is not None, sequence.order
        stay.ledger.stop(stay, tell=True)
        registry.detach(sequence)
        registry.wait(sequence)
    sequence.output = unpack_ids(admission.output + item.tokens)
    over = item.finish is not None or item.error is not None
    if item.released:
        # Stopped by our predecessor to be placed anew (had it been cancelled, its log or a tombstone would say so).
        registry.detach(sequence)
        sequence.begin_attempt(admission.attempt)
        if sequence.state is SequenceState.UNKNOWN and not over:
            registry.wait(sequence)
    else:
        stay = ledger.restore(admission.sequence_id, sequence, list(admission.block_ids), item.num_computed)
        registry.run(sequence, stay, admission.attempt)
    if over:
        conclude(registry, sequence, item.error)


def conclude(registry: Registry, sequence: Sequence, problem: str | None) -> None:
    """Its worker says that it is over. `problem`: why it could not go on."""
    if problem is not None:
        fail(registry, sequence.request, problem)
    else:
        registry.end(sequence, Outcome.FINISHED, tell=False)


def fail(registry: Registry, request: OwnedRequest, problem: str) -> None:
    """`problem`: as a worker tells it, for our eyes."""
    if problem.startswith(GRAMMAR_FAILED):
        registry.fail(request, GRAMMAR_TOO_COMPLEX, GRAMMAR_MESSAGE, problem)
    else:
        registry.fail(request, "internal_error", FAILED_MESSAGE, problem)


def abandon(registry: Registry, ledger: WorkerLedger, *, reads_logs: bool = False) -> list[OwnedRequest]:
    """The ledger's sequences wait again; with `reads_logs`, only when `restore` has told what the log knows of them.
    Returns whose they are."""
    sequences = [stay.sequence for stay in ledger.stays.values() if stay.sequence is not None]
    for sequence in sequences:
        registry.detach(sequence)
        if reads_logs:
            registry.lose(sequence)
        elif sequence.state is SequenceState.RUNNING:
            registry.wait(sequence)
    requests = list({id(sequence.request): sequence.request for sequence in sequences}.values())
    for request in requests:
        registry.unpark(request)
    return requests


def unknown_of(requests: Iterable[OwnedRequest]) -> tuple[RequestId, ...]:
    """Those of which only the log knows how far they got."""
    return tuple(request.request.request_id for request in requests if request.in_state(SequenceState.UNKNOWN))


def restore(registry: Registry, request: OwnedRequest, logs: Mapping[int, ChoiceLog]) -> None:
    """Fits what the log knows into every open choice. Of the unknown ones the first waits, and the others wait for
    it to compute the prompt."""
    for sequence in request.sequences:
        log = logs.get(sequence.choice)
        if sequence.state is SequenceState.ENDED:
            continue
        if log is not None and (sequence.last_attempt is None or log.attempt > sequence.last_attempt):
            _catch_up(registry, sequence, log)
        elif log is not None and sequence.state is SequenceState.UNKNOWN:
            _learn(registry, sequence, log)  # its worker is lost, and had told more to its user than to us
        if sequence.state is SequenceState.UNKNOWN:
            registry.park(sequence)
    registry.unpark(request)


def affected(ledger: WorkerLedger) -> list[OwnedRequest]:
    """Requests that are not over and had something there, if only in flight."""
    return list({id(r): r for stay in ledger.stays.values() if (r := stay.request) and r.num_open}.values())


def aboard(ledger: WorkerLedger) -> list[OwnedRequest]:
    """Requests with a sequence whose latest stay is there."""
    return list({id(s.request): s.request for stay in ledger.stays.values() if (s := stay.sequence)}.values())


def is_self_contained(ledger: WorkerLedger) -> bool:
    """None of its requests is on another worker of ours too."""
    return all(
        sequence.stay is None or sequence.stay.ledger is ledger
        for request in aboard(ledger)
        for sequence in request.sequences
    )


def _catch_up(registry: Registry, sequence: Sequence, log: ChoiceLog) -> None:
    """The log has a later attempt than we know of. Routers listen to no earlier one: a stay of such is stopped."""
    stay = sequence.stay
    if sequence.state is SequenceState.RUNNING:
        assert stay is not None, sequence.order
        stay.ledger.stop(stay, tell=True)
        registry.wait(sequence)
    registry.detach(sequence)
    sequence.begin_attempt(log.attempt)
    _learn(registry, sequence, log)


def _learn(registry: Registry, sequence: Sequence, log: ChoiceLog) -> None:
    if len(log.output) > len(sequence.output):  # the log may have lost its beginning in a restart of the broker
        sequence.output = array("I", log.output)
    if log.finish is not None:
        registry.end(sequence, Outcome.FINISHED)
