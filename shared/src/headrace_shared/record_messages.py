"""What is kept or told of requests for people and for later: losses, the dead, the flight recording, stories. Data
only, as in `messages.py`, whose rules hold here.
"""

from msgspec import Struct

from headrace_shared.messages import Lane, Request, RequestId, RouterId, SchedulerId


class LossRecord(Struct, frozen=True, tag=True, kw_only=True):
    """Written before the request touches another worker, so that no death of a scheduler makes a request look new."""

    num_losses: int
    suspicion: int
    reasons: tuple[str, ...] = ()
    """Of the latest losses, oldest first: which worker, and why it is gone."""


class DeadRequest(Struct, frozen=True, tag=True, kw_only=True):
    """A request that was given up. Holds nothing that its user wrote unless the scheduler is told to keep it."""

    request_id: RequestId
    router: RouterId
    model: str
    reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    """Over all choices."""
    num_choices: int = 1
    max_tokens: int = 0
    lane: Lane = Lane.INTERACTIVE
    tenant: str = ""
    losses: tuple[str, ...] = ()
    """As in `LossRecord.reasons`."""
    died_at: float = 0.0
    """Seconds since the epoch."""
    request: Request | None = None
    """Only where prompts are kept: what it takes to try again."""


class FlightPart(Struct, frozen=True, tag=True, kw_only=True):
    """A piece of a chunk of a scheduler's flight recording, which is of a size that the broker takes."""

    scheduler: SchedulerId
    chunk: int
    """Number of the chunk."""
    part: int
    num_parts: int
    data: bytes
    """Readable by the version of the scheduler that wrote it."""


class StoryQuery(Struct, frozen=True, tag=True, kw_only=True):
    request_id: RequestId
    router: RouterId
    """Who wants to know."""


class StoryLine(Struct, frozen=True, array_like=True):
    """One thing that happened to a request. Nothing in it is the user's text."""

    at: float
    """Seconds since the epoch."""
    scheduler: str
    kind: str
    """One word for programs; see the scheduler's `story.py`."""
    text: str
    worker: str = ""


class Story(Struct, frozen=True, tag=True, kw_only=True):
    """What all flight recordings know of a request, in the order of time."""

    request_id: RequestId
    lines: tuple[StoryLine, ...] = ()
    problem: str = ""
    """Why there are none, or not all."""
