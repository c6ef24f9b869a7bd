"""Takes requests from the queue, only while there is room for them and a worker to run them.

The stream stays the queue: what this process holds is a window. Interactive requests come first; batch requests fill
what they leave.
"""

import asyncio
import re
from collections.abc import Callable

import structlog
from msgspec import Struct

from headrace_scheduler.cancellations import Cancellations
from headrace_scheduler.decisions import OUTCOMES, AddResult, EndedRequest
from headrace_scheduler.endings import Endings
from headrace_scheduler.lifetimes import Lifetimes
from headrace_scheduler.losses import Losses
from headrace_scheduler.request_traces import RequestTraces
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.token_log import read_log
from headrace_shared import codec
from headrace_shared.bus import Bus, Delivery
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.message_sizes import largest_message
from headrace_shared.messages import CancelReason, Lane, Outcome, Request, RequestEnded, RequestId, RouterId
from headrace_shared.subjects import ConsumerSpec, requests_consumer

NUM_PULLERS = 16
"""Concurrent pulls of the interactive lane; each takes one message at a time."""
PULL_S = 0.5
"""How long a pull waits at the broker: also how long a stop waits for the pulls, and a request for the pulls of a
scheduler that has just lost its last worker."""
RETRY_S = 0.25
"""Also how soon a pull without room looks again by itself; passes that make room tell at once."""
MAX_CHOICES = 128
_WORDS = {CancelReason.DEADLINE: ("timeout", "The request took too long.")}
"""Code and message."""

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
_ROUTER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

log = structlog.get_logger(__name__)


class _RequestHead(Struct, frozen=True, kw_only=True, tag="Request"):
    """What is needed to tell a router that its request is unusable."""

    request_id: RequestId
    router: RouterId


class Intake:
    """`run` is its task; it returns once `stop` was called and the pulls under way have come back."""

    def __init__(
        self,
        bus: Bus,
        model: str,
        core: Callable[[], Scheduler],
        endings: Endings,
        cancellations: Cancellations,
        losses: Losses,
        lifetimes: Lifetimes,
        *,
        max_deliveries: int,
        may_pull: Callable[[], bool],
        wake: Callable[[], None],
        clock: Callable[[], float],
        traces: RequestTraces | None = None,
        note: Callable[[Request], None] = lambda _: None,
    ) -> None:
        """`note` is told of every request that is taken."""
        self._bus = bus
        self._model = model
        self._core = core
        self._endings = endings
        self._cancellations = cancellations
        self._losses = losses
        self._lifetimes = lifetimes
        self._max_deliveries = max_deliveries
        self._may_pull = may_pull
        self._wake = wake
        self._clock = clock
        self._traces = traces
        self._note = note
        self._interactive = requests_consumer(model, Lane.INTERACTIVE)
        self._batch = requests_consumer(model, Lane.BATCH)
        self._num_pulling = 0
        self._has_room = asyncio.Event()
        self._num_without_room = 0
        self._is_stopping = False
        self.num_refused = 0
        """Messages that were unusable, since the start."""

    def stop(self) -> None:
        self._is_stopping = True
        self._has_room.set()

    def on_pass(self) -> None:
        """A scheduling pass may have made room."""
        if self._num_without_room and self._core().room() > self._num_pulling:
            self._has_room.set()
            if not self._is_stopping:
                self._has_room = asyncio.Event()  # who waits now is woken; who comes later waits for the next pass

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_PULLERS):
                group.create_task(self._pull_loop(self._interactive), name=f"interactive-{number}")
            group.create_task(self._pull_loop(self._batch), name="batch")

    async def take(self, delivery: Delivery, pulled_at: float | None = None) -> None:
        """Hands one message of the queue to the core, or ends it. Raises BusError: it is offered again later.
        `pulled_at`: when the pull that got it began; now, if not given."""
        try:
            request = _parse(delivery.data, self._model)
        except ProtocolError as error:
            await self._refuse(delivery, str(error))
            return
        request_id = request.request_id
        self._note(request)
        if self._traces is not None:
            self._traces.taken(request, delivery, self._clock() if pulled_at is None else pulled_at)
        if largest_message(request) > self._bus.max_payload:
            log.error("request too large", request_id=request_id, num_bytes=len(delivery.data))
            self._fail(delivery, request, "The prompt and its answer are too long.", code="context_length_exceeded")
            return
        logs = losses = None
        if delivery.num_delivered > 1:
            known = await read_log(self._bus, request.router, request_id)
            if known.has_ended:
                await self._endings.acknowledge(delivery.ack_subject)
                return
            logs = known.choices
            losses = await self._losses.read(request_id)
        if (verdict := await self._judge(request, delivery)) is not None:
            self._end(delivery, request, OUTCOMES[verdict], *_WORDS.get(verdict, ("", "")))
            return
        result = self._core().add_request(
            request, delivery.ack_subject, delivery.stream_sequence, delivery.num_delivered, self._clock(), logs, losses
        )
        if result is AddResult.ENDED:
            if not self._endings.end_again(request_id, delivery.ack_subject):
                await self._endings.acknowledge(delivery.ack_subject)
            return
        # A scheduler whose workers are all lost leaves its requests to the queue: no fault of theirs.
        num_unexplained = delivery.num_delivered - (losses.num_losses if losses is not None else 0)
        if result is AddResult.ADDED and num_unexplained > self._max_deliveries:
            # Broker and schedulers count deliveries for us: what makes schedulers die is bounded as well.
            reason = f"taken from the queue {delivery.num_delivered} times"
            self._core().give_up(request_id, reason, self._clock())
            self._wake()
            return
        self._lifetimes.on_taken(request, delivery.published_at)
        self._cancellations.on_added(request_id)
        self._wake()

    async def _judge(self, request: Request, delivery: Delivery) -> CancelReason | None:
        """Why it is of no use any more, if so. What the core has already is its business. Raises BusError."""
        if self._lifetimes.knows(request.request_id):
            return None
        cancel = await self._cancellations.before_adding(request.request_id, delivery)
        return cancel.reason if cancel is not None else await self._lifetimes.verdict(request, delivery)

    async def _pull_loop(self, spec: ConsumerSpec) -> None:
        while not self._is_stopping:
            try:
                # Idle pulls of the interactive lane hold no room against the batch lane: it may exceed it by one.
                num_promised = 0 if spec is self._batch else self._num_pulling
                if not self._bus.is_connected or not self._may_pull() or self._core().room() <= num_promised:
                    await self._wait_for_room()
                elif spec is self._batch and not await self._is_interactive_idle():
                    await asyncio.sleep(RETRY_S)
                else:
                    await self._pull(spec)
            except BusError as error:
                log.info("queue not readable", consumer=spec.name, error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _wait_for_room(self) -> None:
        self._num_without_room += 1
        try:
            async with asyncio.timeout(RETRY_S):
                await self._has_room.wait()
        except TimeoutError:
            return  # the worker or the broker that was missing may be back
        finally:
            self._num_without_room -= 1

    async def _is_interactive_idle(self) -> bool:
        if self._core().num_waiting:
            return False
        return not (await self._bus.queue_depth(self._interactive)).num_pending

    async def _pull(self, spec: ConsumerSpec) -> None:
        self._num_pulling += 1
        pulled_at = self._clock()
        try:
            delivery = await self._bus.pull(spec, PULL_S)
        finally:
            self._num_pulling -= 1
        if delivery is None:
            return
        if self._is_stopping:
            self._bus.give_back(delivery.ack_subject, PULL_S)  # not to another pull of ours that is under way
        else:
            await self.take(delivery, pulled_at)

    async def _refuse(self, delivery: Delivery, problem: str) -> None:
        """Nobody will ever be able to run it, so that it must not come back; its router is told if it can be found."""
        self.num_refused += 1
        log.error("unusable message taken out of the queue", problem=problem, subject=delivery.subject)
        try:
            head = codec.decode(delivery.data, _RequestHead)
        except ProtocolError:
            head = None
        if head is not None and _are_ids(head.request_id, head.router):
            self._fail(delivery, head, "The request is not readable.")
        else:
            await self._endings.acknowledge(delivery.ack_subject)

    def _fail(
        self, delivery: Delivery, request: Request | _RequestHead, message: str, code: str = "internal_error"
    ) -> None:
        self._end(delivery, request, Outcome.FAILED, code, message)

    def _end(
        self, delivery: Delivery, request: Request | _RequestHead, outcome: Outcome, code: str, message: str
    ) -> None:
        event = RequestEnded(request_id=request.request_id, outcome=outcome, code=code, message=message)
        self._endings.end(EndedRequest(event, request.router, delivery.ack_subject, delivery.stream_sequence))


def _parse(data: bytes, model: str) -> Request:
    """The router has checked what a client sent; this is about messages that no router of ours has written."""
    request = codec.decode(data, Request)
    if not _are_ids(request.request_id, request.router):
        raise ProtocolError("the ids are malformed")
    if request.model != model:
        raise ProtocolError(f"it is for the model {request.model!r}")
    if not request.prompt or len(request.prompt) % 4:
        raise ProtocolError("the prompt is malformed")
    if not 1 <= request.num_choices <= MAX_CHOICES or request.stop.max_tokens < 1:
        raise ProtocolError("the number of choices or tokens is out of range")
    return request


def _are_ids(request_id: RequestId, router: RouterId) -> bool:
    return bool(_REQUEST_ID.fullmatch(request_id) and _ROUTER_ID.fullmatch(router))
