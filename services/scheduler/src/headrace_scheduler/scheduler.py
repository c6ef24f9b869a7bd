"""The scheduler's pure core: events in, decisions out. No I/O, clock, randomness or environment; time is an argument.

The shell calls the event methods as things happen and `schedule` after each batch of events, then sends what it returns.
Each event method leaves every structure consistent (`check_integrity`), and none raises for what a peer may send.
"""

from collections.abc import Iterator, Mapping, Sequence

from headrace_scheduler.decisions import (
    AddResult,
    Adoption,
    ChoiceLog,
    Decisions,
    Gauges,
    SchedulerConfig,
    WorkerFacts,
)
from headrace_shared.messages import (
    CancelReason,
    Progress,
    Request,
    RequestId,
    SequenceSnapshot,
    WorkerId,
)


class Scheduler:
    """All requests and leased workers of one model in one scheduler process. `now` is any monotonic time in seconds."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self._config = config or SchedulerConfig()

    def add_worker(
        self, worker_id: WorkerId, facts: WorkerFacts, snapshot: Sequence[SequenceSnapshot], now: float
    ) -> Adoption:
        """A worker whose lease we hold, with all parts of its snapshot (empty if it holds nothing).

        Also for a known worker that was adopted again under a new epoch: the snapshot is the truth, credit that was
        decided for it but not yet fetched by `schedule` is void, and sequences that it does not hold are placed anew.
        """
        raise NotImplementedError

    def worker_lost(self, worker_id: WorkerId, now: float) -> None:
        """Died, leaves, or its lease is gone. Its sequences wait again, with their output. Unknown: no-op."""
        raise NotImplementedError

    def set_accepting(self, worker_id: WorkerId, accepting: bool) -> None:
        """Whether the worker gets new sequences (false while it drains). Unknown: no-op."""
        raise NotImplementedError

    def add_request(
        self,
        request: Request,
        ack_subject: str,
        stream_sequence: int,
        num_delivered: int,
        now: float,
        logs: Mapping[int, ChoiceLog] | None = None,
    ) -> AddResult:
        """A message of the queue. `logs` (by choice) is needed when `num_delivered` > 1: choices absent from it start
        afresh. For a known request its ack subject is replaced, and choices of which nothing is known are restored
        from `logs` if given. A Cancel that came earlier is not remembered here: look for its tombstone after this."""
        raise NotImplementedError

    def restore(self, request_id: RequestId, logs: Mapping[int, ChoiceLog], now: float) -> None:
        """Tells what the log knows of an incompletely adopted request; choices absent from `logs` start afresh."""
        raise NotImplementedError

    def forget(self, request_id: RequestId) -> tuple[str, int] | None:
        """Drops a request without a terminal event, since its log already has one. Returns ack subject and stream
        sequence if it was known, for the acknowledgement."""
        raise NotImplementedError

    def cancel(self, request_id: RequestId, choice: int | None, reason: CancelReason, now: float) -> None:
        """Ends a choice, or all that are open. Idempotent; unknown ids are no error."""
        raise NotImplementedError

    def apply_progress(self, worker_id: WorkerId, progress: Progress, now: float) -> None:
        """Progress of the current epoch, in order of its numbers: the shell has checked both."""
        raise NotImplementedError

    def schedule(self, now: float) -> Decisions:
        """Extends, preempts and admits, and hands out all that was decided since the last call. Call it after each
        batch of events; a call without any costs next to nothing."""
        raise NotImplementedError

    def room(self) -> int:
        """How many more sequences (choices, not requests) intake may pull now. 0 without a worker."""
        raise NotImplementedError

    @property
    def num_waiting(self) -> int:
        """Sequences that are not on a worker."""
        raise NotImplementedError

    def ack_subjects(self) -> Iterator[tuple[RequestId, str]]:
        """Of all requests we own, for signs of life to the queue."""
        raise NotImplementedError

    def gauges(self) -> Gauges:
        """Figures of now. Linear in the number of running sequences: for once a second."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raises AssertionError, with the values, if any structure disagrees with another (I1). For tests and idle."""
        raise NotImplementedError
