"""One HTTP call on its way, and how its client is to be answered."""

import secrets
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from starlette.types import Send

from headrace_router.accounts import Charge
from headrace_router.call_meter import CallMeter
from headrace_router.call_record import AnswerForm, CallRecord
from headrace_router.call_trace import CallTrace
from headrace_router.identity import Identity
from headrace_router.models import ServedModel
from headrace_router.positions import Position
from headrace_router.prompt import Prompt
from headrace_shared.messages import RequestId
from headrace_shared.trace_context import TraceContext


class Keeper(Protocol):
    """Keeps what a call answers for longer than its client waits."""

    async def queued(self, record: CallRecord) -> None:
        """A held call's requests are in the queue. Raises RequestError or BusError: then nobody gets its answer."""
        ...

    async def answered(self, answer: bytes) -> None:
        """The whole answer, in the words of its API, before its end is told. Raises nothing."""
        ...


class Call(NamedTuple):
    request_id: RequestId
    """Of what it begins, if it does."""
    shown_id: str
    headers: Mapping[str, str]
    send: Send
    arrived_at: float
    """Monotonic."""
    identity: Identity
    charge: Charge
    """What was taken from the caller's account for it."""
    meter: CallMeter
    context: TraceContext
    """What its logs are told by, and what its requests carry where nothing is traced."""
    trace: CallTrace | None = None
    keeper: Keeper | None = None


class Plan(NamedTuple):
    """What the client of a call is to get."""

    model: ServedModel
    form: AnswerForm
    prompts: list[Prompt]
    created: int
    timeout_s: float
    """From the call's arrival."""
    is_held: bool = False
    """The client may come back: the answer goes on without it for a while."""
    sends_ids: bool = False
    follows: bool = False
    """The requests were queued before."""
    told: Position | None = None
    """What the client knows already."""
    tells_queue: bool = False
    """The client takes events about its place in the queue."""
    comments_queue: bool = False
    """It hears of it in comments."""
    starting_after: int = -1
    """Number of the last event that the client knows, of an API that numbers its events."""

    @property
    def request_id(self) -> RequestId:
        """Of the call that queued the requests."""
        return self.prompts[0].request.request_id

    @property
    def max_tokens(self) -> int:
        """Of one choice."""
        return self.prompts[0].request.stop.max_tokens

    @property
    def num_choices(self) -> int:
        return sum(len(prompt.choices) for prompt in self.prompts)


def new_request_id() -> RequestId:
    return RequestId(secrets.token_hex(16))
