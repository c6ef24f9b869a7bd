"""One connection to the broker, kept for ever: the only module that imports nats.

nats-py's own reconnecting is switched off. It keeps what was unsent and sends it after the outage (requests that
were reported as failed would run), closes for good on most errors the server may report, waits without a bound for a
hung peer, and comes back without jitter. So each nats-py client lives as long as its socket; when the socket breaks or
the broker stops answering, the client is dropped with all it holds and a new one takes its place.

Signs of life are messages that we send to ourselves through the broker: cancelling the wait for nats-py's own PONG
kills its read loop. Misses are counted in ticks and not in seconds, so that a blocked event loop blames nobody.
"""

import asyncio
import contextlib
import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import nats.aio.client
import nats.errors

from headrace_shared.bus import Handler, Message
from headrace_shared.bus_rules import HEADER_ROOM, check_size, check_subject
from headrace_shared.errors import BusOverloaded, BusUnavailable, OutcomeUnknown, PayloadTooLarge
from headrace_shared.nats_outbox import Outbox
from headrace_shared.tasks import end

log = logging.getLogger(__name__)

ATTEMPT_TIMEOUT_S = 2
MIN_RETRY_S = 0.05
MAX_RETRY_S = 1.0
TICKS_PER_INTERVAL = 4
SUSPECT_MISSES = 2
"""Half an interval without an answer: not connected."""
DEAD_MISSES = 7
"""Nearly two intervals: the client is dropped and replaced."""
MAX_UNSENT_BYTES = 32 * 1024 * 1024
"""Bytes of requests that nats-py may hold."""
DISPOSE_TIMEOUT_S = 1.0


class ConnectionOptions(NamedTuple):
    servers: tuple[str, ...]
    name: str
    user: str | None
    password: str | None
    credentials: str | None
    """Path of a NATS credentials file."""
    ping_interval_s: float


class Reply(NamedTuple):
    subject: str
    reply_to: str
    data: bytes
    headers: Mapping[str, str]

    @property
    def status(self) -> str:
        """Of a message from the server itself, else empty."""
        return self.headers.get("Status", "")


ReplyHandler = Callable[[Reply | None], None]
"""Gets None when the connection is lost: no more replies will come."""


class NatsSubscription:
    """Outlives the clients: each new one subscribes again."""

    def __init__(self, connection: "NatsConnection", subject: str, handler: Callable[[Reply], None]) -> None:
        self._connection = connection
        self.subject = subject
        self.handler = handler
        self.current: Any = None
        """nats-py's subscription on the present client."""

    async def close(self) -> None:
        await self._connection.unsubscribe(self)


class NatsConnection:
    """See the module. `on_closed` is called once if there will never be a connection again, `close` excepted."""

    def __init__(self, options: ConnectionOptions, on_closed: Callable[[], None]) -> None:
        self._options = options
        self._on_closed = on_closed
        self._client: Any = None
        self._suspect = False
        self._is_closing = False
        self._lost = asyncio.Event()
        self._heard_at = time.monotonic()
        self._num_heard = 0
        self._max_data = 0
        self._max_headers = 0
        self._inbox = f"_INBOX.{secrets.token_hex(11)}."
        self._next_token = 0
        self._replies: dict[str, ReplyHandler] = {}
        self._subscriptions: list[NatsSubscription] = []
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._leftovers: set[asyncio.Task[None]] = set()
        self._outbox = Outbox(self._send, self._is_backed_up, self.echo)
        self._keeper: asyncio.Task[None] | None = None

    # State.

    @property
    def is_connected(self) -> bool:
        return not self._suspect and self._client is not None and self._client.is_connected

    @property
    def disconnected_for_s(self) -> float:
        return 0.0 if self.is_connected else time.monotonic() - self._heard_at

    @property
    def max_payload(self) -> int:
        """Largest `data`; 0 before the first connection."""
        return self._max_data

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """`callback` must not raise."""
        self._reconnect_callbacks.append(callback)

    # Life.

    async def open(self, timeout_s: float) -> None:
        """Connects, trying again for `timeout_s`. Raises BusUnavailable."""
        await self._establish(time.monotonic() + timeout_s)
        self._keeper = asyncio.create_task(self._keep(), name=f"nats-{self._options.name}")

    async def close(self) -> None:
        """Sends what is queued (bounded by a second) and disconnects."""
        if self._is_closing:
            return
        self._is_closing = True
        if self.is_connected:
            with contextlib.suppress(TimeoutError, BusUnavailable, OutcomeUnknown):
                async with asyncio.timeout(1.0):
                    await self._outbox.flush()
                    await self.echo()
        if self._keeper is not None:
            await end(self._keeper)
        await self._drop_client()
        if self._leftovers:
            await asyncio.wait(self._leftovers, timeout=DISPOSE_TIMEOUT_S)

    async def _keep(self) -> None:
        """Watches the client and replaces it, for ever."""
        try:
            while True:
                await self._watch_until_lost()
                await self._drop_client()
                await self._establish(math.inf)
                log.info("connected to the broker again", extra={"connection": self._options.name})
                self._call_reconnect_callbacks()
        except Exception:
            # Whatever it is, nobody keeps the connection from here on: the process has to know.
            log.exception("connection to the broker closed for good", extra={"connection": self._options.name})
            await self._drop_client()
            self._on_closed()

    async def _watch_until_lost(self) -> None:
        tick_s = self._options.ping_interval_s / TICKS_PER_INTERVAL
        misses = 0
        while misses < DEAD_MISSES:
            num_heard = self._num_heard
            with contextlib.suppress(BusUnavailable, OutcomeUnknown):
                await self._send(self._inbox + "alive", b"")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(tick_s):
                    await self._lost.wait()
            if self._lost.is_set():
                # Until now the broker could be heard, so this is when the outage began.
                if not self._suspect:
                    self._heard_at = time.monotonic()
                log.warning("lost the broker", extra={"connection": self._options.name})
                return
            misses = misses + 1 if self._num_heard == num_heard else 0
            was_suspect, self._suspect = self._suspect, misses >= SUSPECT_MISSES
            if was_suspect and not self._suspect:
                self._call_reconnect_callbacks()
        log.warning("the broker does not answer", extra={"connection": self._options.name})

    async def _establish(self, deadline: float) -> None:
        """Connects and subscribes again, trying until the deadline (monotonic). Raises BusUnavailable then, or at once
        if the broker refuses who we are."""
        retry_s = MIN_RETRY_S
        servers = self._options.servers
        while True:
            self._client = nats.aio.client.Client()
            self._lost.clear()
            # A task of its own, since nats-py sometimes swallows a cancellation and goes on.
            attempt = asyncio.create_task(self._attempt(self._client, random.choice(servers)))
            try:
                await asyncio.wait([attempt], timeout=2 * ATTEMPT_TIMEOUT_S)
            finally:
                await end(attempt)
                if attempt.cancelled() or attempt.exception() is not None:
                    await self._drop_client()
            error = TimeoutError() if attempt.cancelled() else attempt.exception()
            if error is None:
                return
            if not isinstance(error, OSError | nats.errors.Error | BusUnavailable | OutcomeUnknown):
                raise error
            log.debug("cannot connect: %r", error, extra={"connection": self._options.name})
            if "authorization violation" in str(error).lower():
                raise BusUnavailable(f"the broker at {', '.join(servers)} refuses our credentials") from error
            if time.monotonic() > deadline:
                raise BusUnavailable(f"no broker at {', '.join(servers)}") from error
            await asyncio.sleep(random.uniform(MIN_RETRY_S, retry_s))
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _attempt(self, client: Any, server: str) -> None:
        async def on_client_closed() -> None:
            if client is self._client:
                self._lost.set()

        options = self._options
        await client.connect(
            server,
            name=options.name,
            user=options.user,
            password=options.password,
            user_credentials=options.credentials,
            closed_cb=on_client_closed,
            error_cb=self._on_error,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=MIN_RETRY_S,
            connect_timeout=ATTEMPT_TIMEOUT_S,
            # Ours is the only watchdog.
            ping_interval=3600,
            # Publishing never waits: no forced flush. The bounds are the outbox and MAX_UNSENT_BYTES.
            pending_size=0,
            skip_subject_validation=True,
        )
        header_room = min(HEADER_ROOM, client.max_payload // 8)
        self._max_data, self._max_headers = client.max_payload - header_room, header_room
        await client.subscribe(self._inbox + "*", cb=self._on_reply)
        for subscription in self._subscriptions:
            subscription.current = await client.subscribe(subscription.subject, cb=_deliver_to(self, subscription))
        self._suspect = False
        await self.echo()
        self._heard_at = time.monotonic()
        self._outbox.start()

    async def _drop_client(self) -> None:
        """The client and all it holds are gone; whoever waits for a reply learns it."""
        client, self._client = self._client, None
        if client is None:
            return
        await self._outbox.stop()
        replies, self._replies = self._replies, {}
        for handler in replies.values():
            handler(None)
        # A plain close waits until a hung peer has read all, and then the unsent bytes would still execute.
        writer = getattr(client._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        task = asyncio.create_task(_close_client(client))
        self._leftovers.add(task)
        task.add_done_callback(self._leftovers.discard)
        await asyncio.wait([task], timeout=DISPOSE_TIMEOUT_S)

    def _call_reconnect_callbacks(self) -> None:
        for callback in self._reconnect_callbacks:
            callback()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            # Messages were dropped: for their readers that is the same as an outage.
            log.warning("a subscription is too slow", extra={"connection": self._options.name})
            self._call_reconnect_callbacks()
        else:
            log.debug("nats: %s", error, extra={"connection": self._options.name})

    # Sending.

    def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """As in `Bus`."""
        if not self.is_connected:
            raise BusUnavailable("not connected to the broker")
        check_subject(subject)
        check_size(data, headers, self._max_data, self._max_headers)
        self._outbox.put(subject, data, headers)

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> Reply:
        """One message out, one back. Raises BusUnavailable (nothing was sent, or nobody listens there), OutcomeUnknown
        (no answer), BusOverloaded, PayloadTooLarge."""
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        inbox = self.expect(lambda reply: None if future.done() else future.set_result(reply))
        try:
            await self.send(subject, data, headers, inbox)
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError as error:
            raise OutcomeUnknown(f"no answer within {timeout_s:g} s") from error
        finally:
            self.forget(inbox)
        if reply is None:
            raise OutcomeUnknown("the connection broke before the answer came")
        if reply.status == "503":
            raise BusUnavailable("nobody listens: JetStream or the stream is not there")
        return reply

    async def send(self, subject: str, data: bytes, headers: Mapping[str, str] | None, reply_to: str) -> None:
        """Hands over to the socket at once, ahead of the outbox. Never waits in fact. Errors as in `request`."""
        if not self.is_connected:
            raise BusUnavailable("not connected to the broker")
        check_size(data, headers, self._max_data, self._max_headers)
        if self._client.pending_data_size > MAX_UNSENT_BYTES:
            raise BusOverloaded(f"{MAX_UNSENT_BYTES} bytes wait for the broker")
        await self._send(subject, data, headers, reply_to)

    def expect(self, handler: ReplyHandler) -> str:
        """A subject for replies that `handler` gets until `forget`."""
        self._next_token += 1
        token = str(self._next_token)
        self._replies[token] = handler
        return self._inbox + token

    def forget(self, inbox: str) -> None:
        self._replies.pop(inbox[len(self._inbox) :], None)

    async def echo(self) -> None:
        """Returns when the broker has processed all that was sent so far. BusUnavailable, OutcomeUnknown."""
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        inbox = self.expect(lambda reply: None if future.done() else future.set_result(reply))
        try:
            await self._send(inbox, b"")
            async with asyncio.timeout(self._options.ping_interval_s):
                reply = await future
        except TimeoutError as error:
            raise OutcomeUnknown("the broker does not answer") from error
        finally:
            self.forget(inbox)
        if reply is None:
            raise OutcomeUnknown("the connection broke")

    async def _send(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, reply_to: str = ""
    ) -> None:
        client = self._client
        if client is None:
            raise BusUnavailable("not connected to the broker")
        try:
            await client.publish(subject, data, reply_to, headers or None)
        except nats.errors.MaxPayloadError as error:
            raise PayloadTooLarge(len(data), client.max_payload) from error
        except nats.errors.Error as error:
            raise BusUnavailable(f"not connected to the broker: {type(error).__name__}") from error

    def _is_backed_up(self) -> bool:
        return self._client is not None and self._client.pending_data_size > Outbox.HIGH_WATER_BYTES

    # Receiving.

    async def subscribe(self, subject: str, handler: Handler) -> NatsSubscription:
        """As in `Bus`."""

        def on_message(reply: Reply) -> None:
            handler(Message(reply.subject, reply.data, reply.headers))

        return await self.listen(subject, on_message)

    async def listen(self, subject: str | None, handler: Callable[[Reply], None]) -> NatsSubscription:
        """The same, for what JetStream delivers: under the message's own subject, with the ack subject as `reply_to`.
        None makes up a subject."""
        if not self.is_connected:
            raise BusUnavailable("not connected to the broker")
        if subject is None:
            self._next_token += 1
            subject = f"{self._inbox}{self._next_token}.deliver"
        subscription = NatsSubscription(self, subject, handler)
        self._subscriptions.append(subscription)
        try:
            subscription.current = await self._client.subscribe(subject, cb=_deliver_to(self, subscription))
            await self.echo()
        except BaseException as error:
            await self.unsubscribe(subscription)
            if isinstance(error, nats.errors.Error | OutcomeUnknown):
                raise BusUnavailable(f"cannot subscribe: {error}") from error
            raise
        return subscription

    async def unsubscribe(self, subscription: NatsSubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
        current, subscription.current = subscription.current, None
        if current is not None:
            with contextlib.suppress(nats.errors.Error):
                await current.unsubscribe()

    def heard(self) -> None:
        self._num_heard += 1
        self._heard_at = time.monotonic()

    async def _on_reply(self, message: Any) -> None:
        self.heard()
        handler = self._replies.get(message.subject[len(self._inbox) :])
        if handler is not None:
            handler(Reply(message.subject, message.reply, message.data, message.headers or {}))


def _deliver_to(connection: NatsConnection, subscription: NatsSubscription) -> Callable[[Any], Any]:
    async def deliver(message: Any) -> None:
        connection.heard()
        try:
            subscription.handler(Reply(message.subject, message.reply, message.data, message.headers or {}))
        except Exception:
            # A handler's fault costs one message, never the subscription.
            log.exception("a handler failed", extra={"subject": message.subject})

    return deliver


async def _close_client(client: Any) -> None:
    with contextlib.suppress(Exception):  # it is thrown away, whatever state it is in
        await client.close()
