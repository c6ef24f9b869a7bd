"""One link to the broker, kept for ever. Nobody else knows nats-py, nor its client (`nats_client.py`).

nats-py's own reconnecting is switched off. It keeps what was unsent and sends it after the outage (requests that
were reported as failed would run), closes for good on most errors the server may report, waits without a bound for a
hung peer, and comes back without jitter. So each nats-py client lives as long as its socket; when the socket breaks or
the broker stops answering, the client is dropped with all it holds and a new one takes its place.

Signs of life are messages that we send to ourselves through the broker: cancelling the wait for nats-py's own PONG
kills its read loop. Misses are counted in ticks and not in seconds, so that a blocked event loop blames nobody.
"""

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import nats.errors
import structlog

from headrace_shared.beats import until_beat
from headrace_shared.broker_identity import BrokerIdentity
from headrace_shared.bus_rules import HEADER_ROOM
from headrace_shared.errors import BusUnavailable, ConfigError, OutcomeUnknown, PayloadTooLarge
from headrace_shared.nats_client import DirectClient, Incoming
from headrace_shared.tasks import end

log = structlog.get_logger(__name__)

ATTEMPT_TIMEOUT_S = 2
MIN_RETRY_S = 0.05
MAX_RETRY_S = 1.0
TICKS_PER_INTERVAL = 4
SUSPECT_MISSES = 2
"""Half an interval without an answer: not connected."""
DEAD_MISSES = 7
"""Nearly two intervals: the client is dropped and replaced."""
DISPOSE_TIMEOUT_S = 1.0
SHORT_LIVED_S = 1.0
"""After a client that lived no longer there is a pause: what ended it may be waiting for the next one."""
LEAST_TICK = 0.5
"""Of a tick: an answer has at least so long."""
WARNING_INTERVAL_S = 10.0
"""Between two warnings of what the broker refuses."""


class LinkOptions(NamedTuple):
    servers: tuple[str, ...]
    name: str
    identity: BrokerIdentity
    ping_interval_s: float


class LinkUser(Protocol):
    """Whoever sits on the link."""

    async def link_up(self) -> None:
        """On each new client, before it counts as connected: subscribe again."""
        ...

    async def link_down(self) -> None:
        """Does what it must before it waits: the wait may be cancelled."""
        ...

    def link_restored(self) -> None:
        """After an outage, or when messages were dropped."""
        ...

    def link_closed(self) -> None:
        """There will never be a connection again."""
        ...


class NatsLink:
    def __init__(self, options: LinkOptions, user: LinkUser) -> None:
        self._options = options
        self._user = user
        self._client: DirectClient | None = None
        self._server = ""
        """That we last tried, or had."""
        self._is_up = False
        self._lost = asyncio.Event()
        self._alive_subject = f"{options.identity.inbox_prefix}.{secrets.token_hex(11)}"
        self._heard_at = time.monotonic()
        self._num_heard = 0
        self._may_warn_at = 0.0
        self.max_data = 0
        self.max_headers = 0
        self._keeper: asyncio.Task[None] | None = None
        self._leftovers: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        return self._is_up and self._client is not None and self._client.is_connected

    @property
    def disconnected_for_s(self) -> float:
        return 0.0 if self.is_connected else time.monotonic() - self._heard_at

    @property
    def unsent_bytes(self) -> int:
        """What waits because the socket takes no more."""
        return 0 if self._client is None else self._client.unsent_bytes

    async def open(self, timeout_s: float) -> None:
        """Connects, trying again for `timeout_s`. Raises BusUnavailable."""
        await self._establish(time.monotonic() + timeout_s)
        self._keeper = asyncio.create_task(self._keep(), name=f"nats-{self._options.name}")

    async def close(self) -> None:
        try:
            if self._keeper is not None:
                await end(self._keeper)
        finally:
            await self._drop_client()
        if self._leftovers:
            await asyncio.wait(self._leftovers, timeout=DISPOSE_TIMEOUT_S)

    def send(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, reply_to: str = "") -> None:
        """Hands over to the socket at once; never waits. Raises BusUnavailable, PayloadTooLarge."""
        client = self._client
        if client is None:
            raise BusUnavailable("not connected to the broker")
        try:
            client.send(subject, data, headers, reply_to)
        except nats.errors.MaxPayloadError as error:
            raise PayloadTooLarge(len(data), client.max_payload) from error
        except nats.errors.Error as error:
            raise BusUnavailable(f"not connected to the broker: {type(error).__name__}") from error

    def subscribe(self, subject: str, handler: Callable[[Incoming], None]) -> Callable[[], None]:
        """On the present client only; returns what ends it. Raises BusUnavailable."""
        client = self._client
        if client is None:
            raise BusUnavailable("not connected to the broker")
        try:
            subscription = client.listen(subject, self._deliver_to(handler))
        except nats.errors.Error as error:
            raise BusUnavailable(f"cannot subscribe: {type(error).__name__}") from error
        return lambda: client.forget(subscription)

    def _deliver_to(self, handler: Callable[[Incoming], None]) -> Callable[[Incoming], None]:
        def deliver(message: Incoming) -> None:
            self._num_heard += 1
            self._heard_at = time.monotonic()
            try:
                handler(message)
            except Exception:
                # A handler's fault costs one message, never the subscription.
                log.exception("a handler failed", subject=message.subject)

        return deliver

    async def _keep(self) -> None:
        """Watches the client and replaces it, for ever."""
        try:
            while True:
                began_at = time.monotonic()
                await self._watch_until_lost()
                await self._drop_client()
                if time.monotonic() - began_at < SHORT_LIVED_S:
                    await asyncio.sleep(random.uniform(MIN_RETRY_S, MAX_RETRY_S))
                await self._establish(math.inf)
                log.info("connected to the broker again", connection=self._options.name)
                self._user.link_restored()
        except Exception:
            # Whatever it is, nobody keeps the connection from here on: the process has to know.
            log.exception("connection to the broker closed for good", connection=self._options.name)
            await self._drop_client()
            self._user.link_closed()

    async def _watch_until_lost(self) -> None:
        tick_s = self._options.ping_interval_s / TICKS_PER_INTERVAL
        misses = 0
        while misses < DEAD_MISSES:
            num_heard = self._num_heard
            with contextlib.suppress(BusUnavailable):
                self.send(self._alive_subject, b"")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_beat(tick_s, time.monotonic(), LEAST_TICK)):
                    await self._lost.wait()
            if self._lost.is_set():
                # Until now the broker could be heard, so this is when the outage began.
                if self._is_up:
                    self._heard_at = time.monotonic()
                log.warning("lost the broker", connection=self._options.name)
                return
            misses = misses + 1 if self._num_heard == num_heard else 0
            was_up, self._is_up = self._is_up, misses < SUSPECT_MISSES
            if self._is_up and not was_up:
                self._user.link_restored()
        log.warning("the broker does not answer", connection=self._options.name)

    async def _establish(self, deadline: float) -> None:
        """A new client, trying until the deadline (monotonic). Raises BusUnavailable then, or at once if the broker
        refuses who we are."""
        retry_s, is_told = MIN_RETRY_S, False
        servers = self._options.servers
        while True:
            self._client = DirectClient()
            self._lost.clear()
            # A task of its own, since nats-py sometimes swallows a cancellation and goes on.
            attempt = asyncio.create_task(self._attempt(self._client, self._next_server()))
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
            if "authorization violation" in str(error).lower():
                raise BusUnavailable(f"the broker at {', '.join(servers)} refuses our credentials") from error
            if time.monotonic() > deadline:
                raise BusUnavailable(f"no broker at {', '.join(servers)}: {_reason(error)}") from error
            tell = log.debug if is_told else log.info
            tell("cannot connect; trying again", error=_reason(error), connection=self._options.name)
            is_told = True
            await asyncio.sleep(random.uniform(MIN_RETRY_S, retry_s))
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _next_server(self) -> str:
        """Another one than before, if there is one: a member of a cluster that hangs would cost the whole time that an
        attempt may take, once more."""
        servers = self._options.servers
        self._server = random.choice([server for server in servers if server != self._server] or servers)
        return self._server

    async def _attempt(self, client: DirectClient, server: str) -> None:
        async def on_client_closed() -> None:
            if client is self._client:
                self._lost.set()

        cause: Exception | None = None

        async def on_error(error: Exception) -> None:
            nonlocal cause
            cause = error
            self._on_error(error)

        options, identity = self._options, self._options.identity
        try:
            loaded = await asyncio.to_thread(identity.load)
        except ConfigError as error:  # it could be read when we started, and may be about to be replaced
            raise BusUnavailable(str(error)) from error
        if loaded.signer is not None:
            # nats-py's own way to a key needs a library of its own for what is one signature.
            client._public_nkey = loaded.signer.public_key
        try:
            await client.connect(
                server,
                name=options.name,
                user=identity.user or None,
                password=identity.password or None,
                signature_cb=loaded.signer,
                tls=loaded.tls,
                tls_handshake_first=loaded.tls is not None,
                closed_cb=on_client_closed,
                error_cb=on_error,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=MIN_RETRY_S,
                connect_timeout=ATTEMPT_TIMEOUT_S,
                # Ours is the only watchdog.
                ping_interval=3600,
                pending_size=0,
                skip_subject_validation=True,
            )
        except nats.errors.NoServersError as error:  # which is all that it says
            raise BusUnavailable(_reason(cause or error)) from error
        except (OSError, nats.errors.Error):
            raise
        except Exception as error:  # it expects no greeting that is cut, or of something else than a broker
            raise BusUnavailable(f"no broker's greeting: {error!r}") from error
        header_room = min(HEADER_ROOM, client.max_payload // 8)
        self.max_data, self.max_headers = client.max_payload - header_room, header_room
        self.subscribe(self._alive_subject, lambda message: None)
        await self._user.link_up()
        self._heard_at = time.monotonic()
        self._is_up = True

    async def _drop_client(self) -> None:
        """The client and all it holds are gone, even if this is cancelled."""
        client, self._client, self._is_up = self._client, None, False
        if client is None:
            return
        # A plain close waits until a hung peer has read all, and then the unsent bytes would still execute.
        # AttributeError: of asyncio before 3.11.3, for an encrypted connection that is closed already.
        with contextlib.suppress(AttributeError):
            client.abort()
        task = asyncio.create_task(_close_client(client))
        self._leftovers.add(task)
        task.add_done_callback(self._leftovers.discard)
        await self._user.link_down()
        await asyncio.wait([task], timeout=DISPOSE_TIMEOUT_S)

    def _on_error(self, error: Exception) -> None:
        is_refusal = "permissions violation" in str(error).lower()
        now = time.monotonic()
        if is_refusal and now >= self._may_warn_at:
            self._may_warn_at = now + WARNING_INTERVAL_S
            log.warning("the broker refuses something", error=str(error), connection=self._options.name)
        else:
            log.debug("nats", error=repr(error), connection=self._options.name)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def _close_client(client: DirectClient) -> None:
    with contextlib.suppress(Exception):  # it is thrown away, whatever state it is in
        await client.close()
