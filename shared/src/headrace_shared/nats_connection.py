"""Requests, replies, subscriptions and publishing on one link, over all its clients."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping

import structlog

from headrace_shared.bus import Handler, Message
from headrace_shared.bus_rules import check_size, check_subject, is_out_of_a_stream, matcher
from headrace_shared.errors import BusOverloaded, BusUnavailable, OutcomeUnknown
from headrace_shared.nats_client import Incoming
from headrace_shared.nats_link import LinkOptions, NatsLink
from headrace_shared.nats_outbox import Outbox

log = structlog.get_logger(__name__)

MAX_UNSENT_BYTES = 32 * 1024 * 1024
"""Bytes of requests that may wait for the socket."""
CLOSE_TIMEOUT_S = 1.0

ReplyHandler = Callable[[Incoming | None], None]
"""Gets None when the connection is lost: no more replies will come."""


class NatsSubscription:
    """Outlives the clients: each new one subscribes again."""

    def __init__(self, connection: "NatsConnection", subject: str, handler: Callable[[Incoming], None]) -> None:
        self._connection = connection
        self.subject = subject
        self.handler = handler
        self.end: Callable[[], None] | None = None
        """Ends it on the present client."""

    async def close(self) -> None:
        await self._connection.unsubscribe(self)


class NatsConnection:
    def __init__(self, options: LinkOptions, on_restored: Callable[[], None], on_closed: Callable[[], None]) -> None:
        """`on_restored` runs when messages may have been missed, `on_closed` once if there will never be a connection
        again, except after `close`. Neither may raise."""
        self._link = NatsLink(options, self)
        self._echo_timeout_s = options.ping_interval_s
        self._on_restored = on_restored
        self._on_closed = on_closed
        self._inbox = f"{options.identity.inbox_prefix}.{secrets.token_hex(11)}."
        self._next_token = 0
        self._replies: dict[str, ReplyHandler] = {}
        self._subscriptions: list[NatsSubscription] = []
        self._outbox = Outbox(self._link.send, self._is_backed_up, self.echo)

    @property
    def is_connected(self) -> bool:
        return self._link.is_connected

    @property
    def disconnected_for_s(self) -> float:
        return self._link.disconnected_for_s

    @property
    def max_payload(self) -> int:
        """Largest `data`; 0 before the first connection."""
        return self._link.max_data

    async def open(self, timeout_s: float) -> None:
        """Connects, trying again for `timeout_s`. Raises BusUnavailable."""
        await self._link.open(timeout_s)

    async def close(self) -> None:
        """Sends what is queued (bounded by CLOSE_TIMEOUT_S) and disconnects. Idempotent."""
        try:
            if self.is_connected:
                with contextlib.suppress(TimeoutError, BusUnavailable, OutcomeUnknown):
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await self.flush()
        finally:
            await self._link.close()

    async def flush(self) -> None:
        """Returns when the broker has dealt with all that was published. Raises BusUnavailable, OutcomeUnknown."""
        await self._outbox.flush()
        await self.echo()

    # What the link tells.

    async def link_up(self) -> None:
        self._link.subscribe(self._inbox + "*", self._on_reply)
        for subscription in self._subscriptions:
            subscription.end = self._link.subscribe(subscription.subject, subscription.handler)
        await self.echo()
        self._outbox.start()

    async def link_down(self) -> None:
        replies, self._replies = self._replies, {}
        for handler in replies.values():
            handler(None)
        await self._outbox.stop()

    def link_restored(self) -> None:
        self._on_restored()

    def link_closed(self) -> None:
        self._on_closed()

    # Sending.

    def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """As in `Bus`."""
        if not self._link.is_connected:
            raise BusUnavailable("not connected to the broker")
        check_subject(subject)
        check_size(data, headers, self._link.max_data, self._link.max_headers)
        self._outbox.put(subject, data, headers)

    def send(self, subject: str, data: bytes, headers: Mapping[str, str] | None, reply_to: str) -> None:
        """Sends at once, ahead of the outbox. Raises BusUnavailable, BusOverloaded, PayloadTooLarge."""
        if not self._link.is_connected:
            raise BusUnavailable("not connected to the broker")
        check_size(data, headers, self._link.max_data, self._link.max_headers)
        if self._link.unsent_bytes > MAX_UNSENT_BYTES:
            raise BusOverloaded(f"{MAX_UNSENT_BYTES} bytes wait for the broker")
        self._link.send(subject, data, headers, reply_to)

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> Incoming:
        """One message out, one back. Raises BusUnavailable (nothing was sent, or nobody listens there), OutcomeUnknown
        (no answer), BusOverloaded, PayloadTooLarge."""
        reply = await self._exchange(lambda inbox: self.send(subject, data, headers, inbox), timeout_s)
        if reply.status == "503":
            raise BusUnavailable("nobody listens: JetStream or the stream is not there")
        return reply

    async def request_many(self, subject: str, data: bytes, *, timeout_s: float) -> tuple[list[Incoming], Incoming]:
        """One message out; all that comes back, and the reply with a status that ends it. Raises as `request`."""
        replies: list[Incoming] = []

        def is_last(reply: Incoming) -> bool:
            if not reply.status:
                replies.append(reply)
            return bool(reply.status)

        last = await self._exchange(lambda inbox: self.send(subject, data, None, inbox), timeout_s, is_last)
        return replies, last

    async def echo(self) -> None:
        """Returns when the broker has processed all that was sent so far. Raises BusUnavailable, OutcomeUnknown."""
        await self._exchange(lambda inbox: self._link.send(inbox, b""), self._echo_timeout_s)

    async def _exchange(
        self,
        send: Callable[[str], None],
        timeout_s: float,
        is_last: Callable[[Incoming], bool] = lambda reply: True,
    ) -> Incoming:
        """The first reply that `is_last`."""
        future: asyncio.Future[Incoming | None] = asyncio.get_running_loop().create_future()

        def on_reply(reply: Incoming | None) -> None:
            if not future.done() and (reply is None or is_last(reply)):
                future.set_result(reply)

        inbox = self.expect(on_reply)
        try:
            send(inbox)
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError as error:
            raise OutcomeUnknown(f"no answer within {timeout_s:g} s") from error
        finally:
            self.forget(inbox)
        if reply is None:
            raise OutcomeUnknown("the connection broke before the answer came")
        return reply

    def _is_backed_up(self) -> bool:
        return self._link.unsent_bytes > Outbox.HIGH_WATER_BYTES

    # Receiving.

    def expect(self, handler: ReplyHandler) -> str:
        """A subject for replies that `handler` gets until `forget`."""
        self._next_token += 1
        token = str(self._next_token)
        self._replies[token] = handler
        return self._inbox + token

    def forget(self, inbox: str) -> None:
        self._replies.pop(inbox[len(self._inbox) :], None)

    def _on_reply(self, message: Incoming) -> None:
        handler = self._replies.get(message.subject[len(self._inbox) :])
        if handler is not None:
            handler(message)

    async def subscribe(self, subject: str, handler: Handler) -> NatsSubscription:
        """As in `Bus`."""

        is_meant = matcher(subject)

        def on_message(message: Incoming) -> None:
            if is_out_of_a_stream(message.headers) or not is_meant(message.subject):
                log.warning("a message that was not sent here is dropped", heard_at=subject, subject=message.subject)
                return
            handler(Message(message.subject, message.data, message.headers))

        return await self.listen(subject, on_message)

    async def listen(self, subject: str | None, handler: Callable[[Incoming], None]) -> NatsSubscription:
        """The same, for what JetStream delivers. None makes up a subject."""
        if not self._link.is_connected:
            raise BusUnavailable("not connected to the broker")
        if subject is None:
            self._next_token += 1
            subject = f"{self._inbox}{self._next_token}.deliver"
        subscription = NatsSubscription(self, subject, handler)
        self._subscriptions.append(subscription)
        try:
            subscription.end = self._link.subscribe(subject, handler)
            await self.echo()
        except OutcomeUnknown as error:
            await self.unsubscribe(subscription)
            raise BusUnavailable(f"cannot subscribe: {error}") from error
        except BaseException:
            await self.unsubscribe(subscription)
            raise
        return subscription

    async def unsubscribe(self, subscription: NatsSubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
        end, subscription.end = subscription.end, None
        if end is not None:
            end()
