"""What goes into the pure core and what comes out of it, apart from the wire messages. Data only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from headrace_shared.messages import (
    Admission,
    CancelReason,
    Extension,
    FinishReason,
    Outcome,
    RequestEnded,
    RequestId,
    RouterId,
    SequenceId,
    WorkerId,
)
from headrace_shared.record_messages import DeadRequest, LossRecord

OUTCOMES = {
    CancelReason.CLIENT: Outcome.CANCELLED,
    CancelReason.STOP: Outcome.FINISHED,
    CancelReason.DEADLINE: Outcome.EXPIRED,
    CancelReason.SHED: Outcome.SHED,
}


class WorkerFacts(NamedTuple):
    """The part of `Hello` that scheduling depends on."""

    num_blocks: int
    block_size: int
    context: int
    max_sequences: int
    tokens_per_iteration: int


class SchedulerConfig(NamedTuple):
    """The core's knobs. The defaults suit every fleet that was measured."""

    horizon_blocks: int = 2
    """Each running sequence is kept this many blocks of tokens ahead of what is known to be generated."""
    prefix_caching: bool = True
    max_waiting: int = 256
    """Most sequences that wait in this process; the rest stays in the stream."""
    max_losses: int = 8
    """A request that has lost its worker more often than this is given up, whoever is to blame."""


class LossCause(Enum):
    """Why a worker is gone, as far as it speaks against those who were on it (`suspects.py`)."""

    HANDED_OVER = "handed over"
    """It was told to leave, or let its sequences go."""
    VANISHED = "vanished"
    """Nothing is heard of it."""
    FAILED = "failed"
    """Its engine died or hangs."""


class ChoiceLog(NamedTuple):
    """What the token log knows of one choice."""

    output: Sequence[int]
    """Token ids from index 0 on, without a gap."""
    attempt: int
    """The highest attempt in any of its frames."""
    finish: FinishReason | None = None


class AddResult(StrEnum):
    ADDED = "added"
    KNOWN = "known"
    """Already waiting or running here; its ack subject was replaced."""
    ENDED = "ended"
    """Ended here a short while ago: acknowledge the message again, publish nothing."""


class Adoption(NamedTuple):
    """What a snapshot taught us."""

    adopted: tuple[RequestId, ...]
    """Requests that were unknown before. Read their logs, before the next `schedule` if possible: `forget` those whose
    log already holds the predecessor's RequestEnded, `restore` the others, and look for tombstones of cancels."""
    incomplete: tuple[RequestId, ...]
    """Those of them with choices of which nothing is known: without `restore` they never end."""
    dropped: tuple[RequestId, ...] = ()
    """Requests that were known and not in the snapshot any more. Where logs are to be read, they wait for `restore`."""


@dataclass(slots=True)
class Credit:
    """One worker's share of the decisions: the body of one or more Grants, to be sent in this order."""

    admissions: list[Admission] = field(default_factory=list)
    extensions: list[Extension] = field(default_factory=list)
    releases: list[SequenceId] = field(default_factory=list)


class EndedRequest(NamedTuple):
    """Publish `event` on the token log, then acknowledge."""

    event: RequestEnded
    router: RouterId
    ack_subject: str
    stream_sequence: int
    detail: str = ""
    """For our own log: why it failed."""
    dead: DeadRequest | None = None
    """To be stored before `event` is published, with its `request` taken out unless prompts are to be kept."""


class Decisions(NamedTuple):
    credits: dict[WorkerId, Credit]
    """Only workers that get something."""
    ended: list[EndedRequest]
    losses: list[tuple[RequestId, LossRecord]]
    """To be stored. Suspects wait until `recorded` says so."""


class WorkerGauges(NamedTuple):
    num_blocks: int
    num_free: int
    """Cached but unreferenced blocks count as free."""
    num_referenced: int
    num_awaiting: int
    """Given up by us, not yet confirmed by the worker."""
    num_cached: int
    """Blocks in the prefix index, whether free or not."""
    num_running: int
    num_runnable: int
    """Running sequences that hold a block for their next token: the engine must move if there is one."""
    num_backlog_tokens: int
    """Known tokens of admitted sequences that are not computed yet."""


class Gauges(NamedTuple):
    num_requests: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    """This and the following count since the start."""
    num_losses: int
    """Requests that lost a worker, or whose sequence the worker dropped."""
    num_trials: int
    """Workers that are kept for a suspect now."""
    num_moved: int
    """Requests that were moved from a draining worker to others."""
    num_admissions: int
    num_known_tokens: int
    """Of all admissions: prompt, and output of earlier attempts."""
    num_cached_tokens: int
    """Those of them that came from the prefix cache or from a sibling choice."""
    workers: dict[WorkerId, WorkerGauges]
