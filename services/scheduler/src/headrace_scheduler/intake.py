"""Takes requests from the queues, only while there is room for them and a worker to run them.

The stream stays the queue: what this process holds is a window. Of each queue the first message is in it even when
others have filled it, so that whoever goes before them is seen: another tenant, or who came earlier and is in another
of the tenant's partitions, which a turn for each would serve without regard to how many wait there. Interactive
requests come first; batch requests fill what they leave, but wait no longer than BATCH_PATIENCE_S for it.

Each queue has one owner among the schedulers (`queue_owners.py`). Who has nothing to do takes from the others' queues.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice

import structlog

from headrace_scheduler.cancellations import Cancellations
from headrace_scheduler.decisions import OUTCOMES, AddResult, EndedRequest
from headrace_scheduler.endings import Endings
from headrace_scheduler.lifetimes import Lifetimes
from headrace_scheduler.losses import Losses
from headrace_scheduler.queue_owners import owners
from headrace_scheduler.queued_request import RequestHead, head_of, parse_request
from headrace_scheduler.request_traces import RequestTraces
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.sequence import SequenceState
from headrace_scheduler.stealing import Stealing
from headrace_scheduler.token_log import first_index, read_log
from headrace_shared.beats import until_beat
from headrace_shared.bus import Bus, Delivery
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.message_sizes import largest_message
from headrace_shared.messages import CancelReason, Lane, Outcome, Request, RequestEnded, RequestId
from headrace_shared.subjects import ACK_WAIT_S, Queue, queues_of

NUM_PULLERS = 32
"""Further pulls under way at a time, beside the one of each queue; each takes one message. They are shared among the
queues of this scheduler, but one may have them all: what begins alike waits in one, and where the broker is 100 ms away
each pull brings only five messages a second."""
MIN_HELPERS = 3
"""Of a queue in which more waits, however many others are busy."""
PULL_S = 0.5
"""How long a pull waits at the broker: also how long a stop waits for the pulls, and a request for the pulls of a
scheduler that has just lost its last worker."""
IDLE_PULL_S = 0.03
"""Pulls of many queues last longer, so that there are no more of them a second."""
BATCH_PATIENCE_S = 30.0
IDLE_S = 0.1
"""A queue from which a pull has brought nothing for so long is empty."""
RETRY_S = 0.25
"""Also how soon a pull without room looks again by itself; passes that make room tell at once."""
MAX_TAKE_S = ACK_WAIT_S - 1.0
"""Until a message that was pulled is ours. Slower, as when we were frozen, a peer may have it before our first sign of
life."""
_WORDS = {CancelReason.DEADLINE: ("timeout", "The request took too long.")}
"""Code and message."""

log = structlog.get_logger(__name__)


class _Pulled:
    """A queue, and the pulls of it."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.spec = queue.consumer
        self.last: RequestId | None = None
        """Taken from it."""
        self.asked_at: float | None = None
        """When the first pull that is under way was begun."""
        self.num_pending = 0
        """What the last pull that came back has left in it."""
        self.num_helpers = 0
        """Loops that pull beside the one that always does, while there is more than that brings."""


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
        own_id: str = "",
        peers: Callable[[], Sequence[str]] = tuple,
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
        self._own_id = own_id
        self._peers = peers
        """Other schedulers that have workers."""
        self._flows: dict[int, list[_Pulled]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._schedulers: tuple[str, ...] = ()
        self._owned: list[_Pulled] = []
        self._batch_at = clock()
        """When a batch request was last taken, or none waited."""
        self._num_pulling = 0
        self._helped: set[_Pulled] = set()
        self._without_room: dict[asyncio.Event, None] = {}
        """Further pulls that may not begin, for each what tells it that it may, in the order they came."""
        self._held_up: dict[_Pulled, asyncio.Event] = {}
        """The same of first pulls."""
        self._is_stopping = False
        self.num_refused = 0
        """Messages that were unusable, since the start."""

    def stop(self) -> None:
        self._is_stopping = True
        for may_go in (*self._without_room, *self._held_up.values()):
            may_go.set()

    def on_pass(self) -> None:
        """A scheduling pass may have made room, or found a place for the first of a queue."""
        if not self._without_room and not self._held_up:
            return
        core = self._core()
        room = core.room()
        for may_go in islice(self._without_room, max(0, room - self._num_pulling)):
            may_go.set()
        if core.accepts:
            for pulled, may_go in self._held_up.items():
                if room > 0 or not self._waits(pulled.last):
                    may_go.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            for flow in self._flows:
                self._start(flow)
            stealing = Stealing(
                self._bus, others=self._others_queues, room=self._room_to_steal, accept=self._accept, clock=self._clock
            )
            self._group.create_task(stealing.run(lambda: self._is_stopping), name="steal")

    def serve(self, flow: int) -> None:
        """The flow's queues have their consumers: takes from them from now on."""
        queues = [queue for lane in Lane for queue in queues_of(self._model, lane, flow)]
        self._flows[flow] = [_Pulled(queue) for queue in queues]
        self._schedulers = ()
        if self._group is not None and not self._is_stopping:
            self._start(flow)

    def _start(self, flow: int) -> None:
        assert self._group is not None
        for pulled in self._flows[flow]:
            self._group.create_task(self._pull_loop(pulled), name=pulled.spec.name)

    async def take(self, delivery: Delivery, pulled_at: float | None = None) -> RequestId | None:
        """Hands one message of the queue to the core, or ends it. Raises BusError: it is offered again later.
        `pulled_at`: when the pull that got it began; now, if not given. Returns the request's id, if it has one."""
        try:
            request = parse_request(delivery.data, self._model)
        except ProtocolError as error:
            await self._refuse(delivery, str(error))
            return None
        self._note(request)
        if self._traces is not None:
            self._traces.taken(request, delivery, self._clock() if pulled_at is None else pulled_at)
        await self._take(request, delivery)
        return request.request_id

    async def _take(self, request: Request, delivery: Delivery) -> None:
        request_id, began_at = request.request_id, self._clock()
        if largest_message(request) > self._bus.max_payload:
            log.error("request too large", request_id=request_id, num_bytes=len(delivery.data))
            self._fail(delivery, request, "The prompt and its answer are too long.", code="context_length_exceeded")
            return
        logs = losses = None
        if delivery.num_delivered > 1:
            known = await read_log(self._bus, request.router, request_id, first_index(request))
            if known.has_ended:
                await self._endings.acknowledge(delivery.ack_subject)
                return
            logs = known.choices
            losses = await self._losses.read(request_id)
        verdict = await self._judge(request, delivery)
        if self._clock() - began_at > MAX_TAKE_S:
            log.warning("taken too slowly: the queue may have offered it to others", request_id=request_id)
            return
        if verdict is not None:
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

    async def _pull_loop(self, pulled: _Pulled) -> None:
        """One pull of each queue is always under way."""
        while not self._is_stopping:
            await self._pull_when_possible(pulled, is_first=True)

    async def _help(self, pulled: _Pulled) -> None:
        try:
            while pulled.num_pending and not self._is_stopping and self._is_ours(pulled):
                await self._pull_when_possible(pulled, is_first=False)
                if pulled.num_helpers > min(self._share, pulled.num_pending):
                    return  # the others bring what is left, or other queues are busy, too, by now
        finally:
            pulled.num_helpers -= 1
            if not pulled.num_helpers:
                self._helped.discard(pulled)

    def _start_helpers(self, pulled: _Pulled) -> None:
        if not pulled.num_pending or pulled.queue.lane is Lane.BATCH or self._group is None:
            return
        self._helped.add(pulled)
        for _ in range(pulled.num_helpers, min(pulled.num_pending, self._share)):
            pulled.num_helpers += 1
            self._group.create_task(self._help(pulled), name=f"{pulled.spec.name}-helper")

    @property
    def _share(self) -> int:
        """Helpers that a queue may have."""
        return max(MIN_HELPERS, NUM_PULLERS // max(1, len(self._helped)))

    async def _pull_when_possible(self, pulled: _Pulled, *, is_first: bool) -> None:
        try:
            if not self._is_ours(pulled):
                await asyncio.sleep(RETRY_S)
            elif self._has_room_for(pulled, is_first=is_first):
                await self._pull(pulled, is_first=is_first)
            else:
                await self._wait_for_room(pulled, is_first=is_first)
        except BusError as error:
            log.info("queue not readable", consumer=pulled.spec.name, error=str(error))
            await asyncio.sleep(RETRY_S)

    def _is_ours(self, pulled: _Pulled) -> bool:
        if pulled not in self._own_queues():
            return False
        return pulled.queue.lane is Lane.INTERACTIVE or self._may_take_batch()

    def _has_room_for(self, pulled: _Pulled, *, is_first: bool) -> bool:
        if not self._bus.is_connected or not self._may_pull():
            return False
        core = self._core()
        room = core.room()
        if not is_first:
            return room > self._num_pulling and self._num_pulling < NUM_PULLERS
        # An idle pull holds no room, or a few empty queues would keep the others from being looked at.
        return room > 0 or (core.accepts and not self._waits(pulled.last))

    def _waits(self, request_id: RequestId | None) -> bool:
        """No worker has any of it yet."""
        request = None if request_id is None else self._core().request(request_id)
        return request is not None and not request.in_state(SequenceState.RUNNING)

    def _may_take_batch(self) -> bool:
        core = self._core()
        if self._clock() - self._batch_at > BATCH_PATIENCE_S:
            return True
        own = [pulled for pulled in self._own_queues() if pulled.queue.lane is Lane.INTERACTIVE]
        now = self._clock()
        return not core.num_waiting and all(now - (pulled.asked_at or now) >= IDLE_S for pulled in own)

    def _own_queues(self) -> list[_Pulled]:
        schedulers = tuple(sorted({*self._peers(), self._own_id}))
        if schedulers != self._schedulers:
            self._schedulers = schedulers
            self._owned = []
            for flow, queues in self._flows.items():
                found = owners(len(queues), f"{self._model}/{flow}", schedulers)
                self._owned += [pulled for pulled, owner in zip(queues, found, strict=True) if owner == self._own_id]
        return self._owned

    def _room_to_steal(self) -> int:
        core = self._core()
        if self._is_stopping or not self._bus.is_connected or not self._may_pull() or core.num_waiting:
            return 0
        return core.room()

    def _others_queues(self) -> list[Queue]:
        own = self._own_queues()
        return [pulled.queue for queues in self._flows.values() for pulled in queues if pulled not in own]

    async def _wait_for_room(self, pulled: _Pulled, *, is_first: bool) -> None:
        may_go = asyncio.Event()
        if is_first:
            self._held_up[pulled] = may_go
        else:
            self._without_room[may_go] = None
        try:
            async with asyncio.timeout(RETRY_S):
                await may_go.wait()
        except TimeoutError:
            return  # the worker or the broker that was missing may be back
        finally:
            if is_first:
                del self._held_up[pulled]
            else:
                del self._without_room[may_go]

    async def _pull(self, pulled: _Pulled, *, is_first: bool) -> None:
        pulled_at = self._clock()
        if is_first:
            pulled.asked_at = pulled_at
        else:
            self._num_pulling += 1
        try:
            # Pulls that bring nothing end together: one message of the broker's wakes us for all.
            longest_s = max(PULL_S, IDLE_PULL_S * len(self._owned))
            delivery = await self._bus.pull(pulled.spec, min(longest_s, until_beat(longest_s, pulled_at)))
        finally:
            if is_first:
                pulled.asked_at = None
            else:
                self._num_pulling -= 1
        if pulled.queue.lane is Lane.BATCH:
            self._batch_at = self._clock()
        pulled.num_pending = 0
        if delivery is not None:  # what is offered again is not counted as pending
            again = MIN_HELPERS if delivery.num_delivered > 1 else 0
            pulled.num_pending = max(delivery.num_pending, again)
        self._start_helpers(pulled)
        if delivery is not None:
            pulled.last = await self._accept(delivery, pulled_at)

    async def _accept(self, delivery: Delivery, pulled_at: float) -> RequestId | None:
        if self._is_stopping:
            self._bus.give_back(delivery.ack_subject, PULL_S)  # not to another pull of ours that is under way
            return None
        return await self.take(delivery, pulled_at)

    async def _refuse(self, delivery: Delivery, problem: str) -> None:
        """Nobody will ever be able to run it, so that it must not come back; its router is told if it can be found."""
        self.num_refused += 1
        log.error("unusable message taken out of the queue", problem=problem, subject=delivery.subject)
        head = head_of(delivery.data)
        if head is not None:
            self._fail(delivery, head, "The request is not readable.")
        else:
            await self._endings.acknowledge(delivery.ack_subject)

    def _fail(
        self, delivery: Delivery, request: Request | RequestHead, message: str, code: str = "internal_error"
    ) -> None:
        self._end(delivery, request, Outcome.FAILED, code, message)

    def _end(
        self, delivery: Delivery, request: Request | RequestHead, outcome: Outcome, code: str, message: str
    ) -> None:
        event = RequestEnded(request_id=request.request_id, outcome=outcome, code=code, message=message)
        self._endings.end(EndedRequest(event, request.router, delivery.ack_subject, delivery.stream_sequence))
