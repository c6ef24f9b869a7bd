"""Who is waiting for which request's events.

One wildcard subscription, made at start-up, feeds everybody: there is no way to ask for tokens too late. Its callback
only puts messages into bounded mailboxes, so a slow client cannot hold up the others.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from headrace_shared.bus import Bus, Message, Subscription
from headrace_shared.codec import decode
from headrace_shared.errors import ProtocolError, RequestError
from headrace_shared.messages import LogMessage, RequestId, RouterId
from headrace_shared.subjects import all_tokens_of

log = structlog.get_logger(__name__)


class Mailbox:
    """Events of the requests of one call, for one reader."""

    def __init__(self, capacity: int) -> None:
        self._messages: deque[LogMessage] = deque()
        self._capacity = capacity
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self.has_overflowed = False
        """The reader was too slow, and something was dropped."""
        self.may_have_missed = False
        """The connection was down for a while. The reader sets it back."""
        self.has_lost_queue = False
        """The broker has another queue than before. The reader sets it back."""
        self.failure: RequestError | None = None
        """The reader is to end with this."""

    @property
    def is_troubled(self) -> bool:
        return self.has_overflowed or self.may_have_missed or self.has_lost_queue or self.failure is not None

    def put(self, message: LogMessage) -> None:
        if len(self._messages) >= self._capacity:
            self.has_overflowed = True
        else:
            self._messages.append(message)
        self._wake()

    def suspect(self) -> None:
        self.may_have_missed = True
        self._wake()

    def lose_queue(self) -> None:
        self.has_lost_queue = True
        self._wake()

    def fail(self, failure: RequestError) -> None:
        self.failure = failure
        self._wake()

    def take(self, most: int) -> list[LogMessage]:
        """What has come, the earliest so many."""
        return [self._messages.popleft() for _ in range(min(most, len(self._messages)))]

    def holds(self, request: RequestId) -> bool:
        """Whether an event of this request has come and not been taken."""
        return any(message.request_id == request for message in self._messages)

    async def wait(self, until: float) -> None:
        """Until there is something new, at most until this time of the event loop. May return early."""
        if self._messages or self.is_troubled:
            return
        loop = asyncio.get_running_loop()
        if self._alarm is None or self._alarm.when() > until:
            # An earlier alarm is left as it is: setting one for each token would cost more than waking up in vain.
            self._stop_alarm()
            self._alarm = loop.call_at(until, self._ring)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        self._stop_alarm()

    def _ring(self) -> None:
        self._alarm = None
        self._wake()

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class InFlightTable:
    def __init__(self, bus: Bus, router: RouterId) -> None:
        self._bus = bus
        self.router = router
        self._mailboxes: dict[RequestId, tuple[Mailbox, ...]] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Must have returned before the first request is queued."""
        self._subscription = await self._bus.subscribe(all_tokens_of(self.router), self._on_message)
        self._bus.on_reconnect(self._on_reconnect)

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()

    def __len__(self) -> int:
        return len(self._mailboxes)

    def register(self, request: RequestId, mailbox: Mailbox) -> Callable[[], None]:
        """From now on the request's events go to this mailbox too; the returned function ends that."""
        assert self._subscription is not None, "register() before start()"
        self._mailboxes[request] = (*self._mailboxes.get(request, ()), mailbox)

        def unregister() -> None:
            left = tuple(other for other in self._mailboxes.get(request, ()) if other is not mailbox)
            if left:
                self._mailboxes[request] = left
            else:
                self._mailboxes.pop(request, None)

        return unregister

    def fail_all(self, failure: RequestError) -> None:
        """Ends all calls."""
        for mailbox in self._all():
            mailbox.fail(failure)

    def on_queue_lost(self) -> None:
        """What was queued is there no more."""
        for mailbox in self._all():
            mailbox.lose_queue()

    def _on_message(self, message: Message) -> None:
        event = event_of(message)
        if event is None:
            return
        for mailbox in self._mailboxes.get(event.request_id, ()):  # none: a late event of a request that is over
            mailbox.put(event)

    def _on_reconnect(self) -> None:
        for mailbox in self._all():
            mailbox.suspect()

    def _all(self) -> set[Mailbox]:
        return {mailbox for mailboxes in self._mailboxes.values() for mailbox in mailboxes}


def event_of(message: Message) -> LogMessage | None:
    """None for what is none, which is logged."""
    try:
        event: LogMessage = decode(message.data, LogMessage)
    except ProtocolError as error:
        log.warning("undecodable event", error=str(error))
        return None
    return event
