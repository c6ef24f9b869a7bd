"""Whose client is here, of the requests that survive the loss of their client's connection.

Every router tells once a second which of them have their client with it (`Attached`); schedulers cancel what nobody
names for a while, so that the death of a router ends what it leaves behind. A router that lives tidies up behind a
client that left by itself: it waits whether the client comes back, here or elsewhere, and cancels like for any other.
"""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import structlog

from headrace_router.cancellation import QueuedRequest
from headrace_shared.beats import beat
from headrace_shared.bus import Bus, Message
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.hearing import Hearing
from headrace_shared.messages import Attached, CancelReason, RequestId, RouterId
from headrace_shared.subjects import ALL_ATTACHED, attached_subject

log = structlog.get_logger(__name__)

PERIOD_S = 1.0
CHECK_S = 0.5
PRESENCE_S = 3.0
"""Named by another router within this time: its client is there."""
MAX_NAMED = 8192
"""Requests in one message."""
MAX_LEFT = 20_000
MAX_ELSEWHERE = 200_000

Abort = Callable[[QueuedRequest, CancelReason], None]


class _Left(NamedTuple):
    queued: QueuedRequest
    at: float
    give_up_at: float


class Attachments:
    """`run` is its task."""

    def __init__(
        self, bus: Bus, router: RouterId, abort: Abort, reattach_timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """`clock` is monotonic, in seconds."""
        self._bus = bus
        self._subject = attached_subject(router)
        self._abort = abort
        self._reattach_timeout_s = reattach_timeout_s
        self._clock = clock
        self._here: Counter[RequestId] = Counter()
        """How many clients each request has here."""
        self._elsewhere: dict[RequestId, float] = {}
        """When another router named it last."""
        self._left: OrderedDict[RequestId, _Left] = OrderedDict()
        """Oldest first."""
        self._hearing_since = clock()
        self._hearing = Hearing(bus, clock())

    async def start(self) -> None:
        """Raises BusUnavailable."""
        await self._bus.subscribe(ALL_ATTACHED, self._on_message)
        self._bus.on_reconnect(lambda: self._tell(list(self._here)))

    @contextlib.contextmanager
    def attached(self, request_ids: Sequence[RequestId]) -> Iterator[None]:
        """A client is here for them, until the block is left."""
        self._here.update(request_ids)
        for request_id in request_ids:
            self._left.pop(request_id, None)
        self._tell(request_ids)
        try:
            yield
        finally:
            for request_id in request_ids:
                self._here[request_id] -= 1
                if not self._here[request_id]:
                    del self._here[request_id]

    def leave(self, queued: QueuedRequest, reason: CancelReason) -> None:
        """A client left before the request was complete; it may come back, unless the request's time is up."""
        if reason in (CancelReason.DEADLINE, CancelReason.SHED):
            self._abort(queued, reason)
            return
        request_id = queued.request.request_id
        self._left.pop(request_id, None)
        now = self._clock()
        self._left[request_id] = _Left(queued, now, now + self._reattach_timeout_s)
        if len(self._left) > MAX_LEFT:
            _, oldest = self._left.popitem(last=False)
            self._give_up(oldest)

    async def run(self) -> None:
        told_at = self._clock()
        while True:
            await beat(CHECK_S)
            now = self._clock()
            if self._hearing.had_gap(now):
                self._hearing_since = now
            if now - told_at >= PERIOD_S - CHECK_S / 2:
                told_at = now
                self._tell(list(self._here))
                self._elsewhere = {key: at for key, at in self._elsewhere.items() if now - at <= PRESENCE_S}
            while self._left and next(iter(self._left.values())).give_up_at <= now:
                if now - self._hearing_since <= PRESENCE_S:
                    break  # their clients may be elsewhere, and we would not know
                _, left = self._left.popitem(last=False)
                self._give_up(left)

    def _give_up(self, left: _Left) -> None:
        request_id = left.queued.request.request_id
        # Who named it before it left us had its client before we did: both would wait for the other.
        heard_at = self._elsewhere.get(request_id, float("-inf"))
        is_elsewhere = heard_at > left.at and self._clock() - heard_at <= PRESENCE_S
        if request_id in self._here or is_elsewhere:
            return  # whoever has the client now will see to it
        log.info("nobody came back", request_id=request_id)
        self._abort(left.queued, CancelReason.CLIENT)

    def _tell(self, request_ids: Sequence[RequestId]) -> None:
        with contextlib.suppress(BusError):  # the next second's message is as good
            for start in range(0, len(request_ids), MAX_NAMED):
                named = Attached(request_ids=tuple(request_ids[start : start + MAX_NAMED]))
                self._bus.publish(self._subject, encode(named))

    def _on_message(self, message: Message) -> None:
        if message.subject == self._subject:
            return
        try:
            named = decode(message.data, Attached)
        except ProtocolError as error:
            log.warning("undecodable list of attached requests", error=str(error))
            return
        now = self._clock()
        for request_id in named.request_ids:
            if request_id in self._elsewhere or len(self._elsewhere) < MAX_ELSEWHERE:
                self._elsewhere[request_id] = now
