"""Ends requests that are of no use any more: nobody waits for them, or their time is up.

Their routers do that too, and sooner, as long as they live. This is for those whose router is dead or cut off.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import structlog

from headrace_scheduler.audience import Listeners
from headrace_scheduler.broker_clock import BrokerClock
from headrace_shared import codec
from headrace_shared.beats import beat
from headrace_shared.bus import Bus, Delivery, Message
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.fleet_messages import Telemetry
from headrace_shared.hearing import Hearing
from headrace_shared.messages import Attached, CancelReason, Request, RequestId, RouterId
from headrace_shared.subjects import ALL_ATTACHED, telemetry_subject

CHECK_S = 0.5
MEASURE_S = 60.0
"""Between two looks at the broker's clock."""

log = structlog.get_logger(__name__)


class _Life(NamedTuple):
    request: Request
    queued_at: float
    """Monotonic; not earlier than it was."""
    taken_at: float = 0.0
    """Monotonic: since when we have it."""
    published_at: float | None = None
    """By the broker's clock."""
    is_sure: bool = False
    """`queued_at` was looked at again, since by it the request's time is up."""


class Lifetimes:
    """`cancel` hands a verdict to the core; `held` are the requests that the core has. `run` is a task."""

    def __init__(
        self,
        bus: Bus,
        broker_clock: BrokerClock,
        reattach_timeout_s: float,
        *,
        cancel: Callable[[RequestId, CancelReason], None],
        held: Callable[[], Iterable[RequestId]],
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._broker_clock = broker_clock
        self._cancel = cancel
        self._held = held
        self._clock = clock
        self._listeners = Listeners(reattach_timeout_s, clock())
        self._hearing = Hearing(bus, clock())
        self._lives: dict[RequestId, _Life] = {}
        """Of those held, and some that were until the last check."""

    async def open(self) -> None:
        """Raises BusError."""
        await self._bus.subscribe(telemetry_subject("router", "*"), self._on_telemetry)
        await self._bus.subscribe(ALL_ATTACHED, self._on_attached)
        await self._broker_clock.measure()
        self._listeners.begin(self._clock())

    async def verdict(self, request: Request, delivery: Delivery) -> CancelReason | None:
        """Whether a request from the queue is to end before it costs anything. Raises BusError."""
        age_s = self._broker_clock.age_s(delivery.published_at)
        if 0.0 < request.timeout_s <= age_s:
            age_s = await self._broker_clock.sure_age_s(delivery.published_at)
        self._notice_freeze()
        reason = self._judge(_Life(request, self._clock() - age_s))
        if reason is not None:
            log.info("request dropped from the queue", request_id=request.request_id, reason=reason, age_s=age_s)
        return reason

    def knows(self, request_id: RequestId) -> bool:
        return request_id in self._lives

    def on_taken(self, request: Request, published_at: float | None) -> None:
        """The core has it now, from the queue or from another scheduler. `published_at`: None if it is not known."""
        if request.request_id not in self._lives:
            now = self._clock()
            self._lives[request.request_id] = _Life(request, now - self._age_s(published_at), now, published_at)

    async def run(self) -> None:
        measured_at = self._clock()
        while True:
            await beat(CHECK_S)
            self._notice_freeze()
            now = self._clock()
            self._listeners.prune(now)
            held = set(self._held())
            self._lives = {key: life for key, life in self._lives.items() if key in held}
            await self._look_again()
            for request_id, life in self._lives.items():
                reason = self._judge(life)
                if reason is not None and (life.is_sure or reason is not CancelReason.DEADLINE):
                    log.info("request cancelled", request_id=request_id, reason=reason, router=life.request.router)
                    self._cancel(request_id, reason)
            if now - measured_at > MEASURE_S and self._bus.is_connected:
                measured_at = now
                try:
                    await self._broker_clock.measure()
                except BusError as error:
                    log.info("the broker's clock was not read", error=str(error))

    async def _look_again(self) -> None:
        """At those whose time seems to be up: should the broker's clock have made a step, they may be as young as we
        know them."""
        doubtful = [
            (request_id, life)
            for request_id, life in self._lives.items()
            if not life.is_sure and self._judge(life) is CancelReason.DEADLINE
        ]
        if not doubtful:
            return
        try:
            await self._broker_clock.measure()
        except BusError as error:
            log.info("the broker's clock was not read", error=str(error))
            return
        now = self._clock()
        for request_id, life in doubtful:
            queued_at = min(life.taken_at, now - self._age_s(life.published_at))
            self._lives[request_id] = life._replace(queued_at=queued_at, is_sure=True)

    def _age_s(self, published_at: float | None) -> float:
        return 0.0 if published_at is None else self._broker_clock.age_s(published_at)

    def _judge(self, life: _Life) -> CancelReason | None:
        now = self._clock()
        if 0.0 < life.request.timeout_s <= now - life.queued_at:
            return CancelReason.DEADLINE
        if self._listeners.is_forsaken(life.request, life.queued_at, now):
            return CancelReason.CLIENT
        return None

    def _notice_freeze(self) -> None:
        now = self._clock()
        if self._hearing.had_gap(now):
            self._listeners.begin(now)

    def _on_telemetry(self, message: Message) -> None:
        try:
            telemetry = codec.decode(message.data, Telemetry)
        except ProtocolError as error:
            log.info("undecodable telemetry of a router", error=str(error))
            return
        self._listeners.on_router(RouterId(telemetry.id), self._clock())

    def _on_attached(self, message: Message) -> None:
        try:
            attached = codec.decode(message.data, Attached)
        except ProtocolError as error:
            log.warning("undecodable list of attached requests", error=str(error))
            return
        self._listeners.on_attached(attached.request_ids, self._clock())
