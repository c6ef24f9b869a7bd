"""The real broker behind the `Bus` protocol.

Two connections, since a slow consumer or a full socket costs a whole connection: `core` carries what is sent at most
once (grants, progress, tokens, telemetry), `store` the JetStream traffic (queue, log reads, buckets).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from headrace_shared.broker_identity import BrokerIdentity
from headrace_shared.broker_permissions import Role
from headrace_shared.bus import Delivery, Entry, Handler, Message, QueueDepth, Subscription, WatchHandler
from headrace_shared.errors import BusUnavailable
from headrace_shared.nats_ack import parse_ack_subject
from headrace_shared.nats_connection import NatsConnection
from headrace_shared.nats_jetstream import ApiOptions, JetStream
from headrace_shared.nats_kv import KeyValue
from headrace_shared.nats_link import LinkOptions
from headrace_shared.nats_watch import Watch
from headrace_shared.patience import RETRY_S, patiently
from headrace_shared.subjects import BucketSpec, ConsumerSpec, StreamSpec

log = structlog.get_logger(__name__)

DEFAULT_CONNECT_TIMEOUT_S = 30.0
DEFAULT_REQUEST_TIMEOUT_S = 5.0
PATIENCE_S = 120.0
"""How long streams and consumers may take to make: a cluster that has just lost a member, or is just starting, elects a
leader first, which takes it 4 to 9 s, or a minute on a machine on which much else is starting. Whoever gives up is only
started again, and has it all before him."""
MAKERS_PATIENCE_S = 600.0
"""The same where somebody else makes them, who may have to be started first."""


class NatsBus:
    """Made by `connect`. Implements `Bus`."""

    def __init__(
        self,
        identity: BrokerIdentity,
        options: Sequence[LinkOptions],
        on_closed: Callable[[], None],
        api: ApiOptions,
    ) -> None:
        self._patience_s = PATIENCE_S if identity.may_make_streams else MAKERS_PATIENCE_S
        closed = _Once(on_closed)
        self._core, self._store = (NatsConnection(each, self._restored, closed) for each in options)
        self._streams = JetStream(self._store, api)
        self._buckets = KeyValue(self._streams)
        self._watches: set[Watch] = set()
        self._reconnect_callbacks: list[Callable[[], None]] = []

    @classmethod
    async def connect(
        cls,
        servers: str | Sequence[str],
        *,
        name: str,
        on_closed: Callable[[], None],
        user: str | None = None,
        password: str | None = None,
        role: Role | None = None,
        credentials: str = "",
        authority: str = "",
        ping_interval_s: float = 2.0,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S,
        num_replicas: int = 1,
    ) -> "NatsBus":
        """Connects, trying for `connect_timeout_s`; raises BusUnavailable after that, ConfigError if a file is not
        usable. From then on it reconnects for ever. A silent broker counts as disconnected after half of
        `ping_interval_s` and is replaced after twice it. `on_closed` is called once if there will never be a connection
        again (the broker refuses our credentials). `credentials` is the path of a file with an nkey
        (`broker_credentials.py`), and `role` whose it is. With `authority`, the path of a certificate authority,
        everything is encrypted. `num_replicas` of the streams is 3 in a cluster."""
        urls = (servers,) if isinstance(servers, str) else tuple(servers)
        identity = BrokerIdentity(role, credentials, authority, user or "", password or "")
        await asyncio.to_thread(identity.load)
        options = [LinkOptions(urls, f"{name}-{part}", identity, ping_interval_s) for part in ("core", "store")]
        api = ApiOptions(request_timeout_s, num_replicas, identity.may_make_streams, identity.reads_directly)
        bus = cls(identity, options, on_closed, api)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(bus._core.open(connect_timeout_s))
                group.create_task(bus._store.open(connect_timeout_s))
        except BaseException as error:
            await bus.close()
            if isinstance(error, BaseExceptionGroup) and isinstance(error.exceptions[0], BusUnavailable):
                raise error.exceptions[0] from None
            raise
        return bus

    @property
    def is_connected(self) -> bool:
        return self._core.is_connected and self._store.is_connected

    @property
    def disconnected_for_s(self) -> float:
        return max(self._core.disconnected_for_s, self._store.disconnected_for_s)

    @property
    def max_payload(self) -> int:
        return self._core.max_payload

    def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._core.publish(subject, data, headers)

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        return await self._core.subscribe(subject, handler)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._reconnect_callbacks.append(callback)

    def _restored(self) -> None:
        """One of the two is back. Callbacks may use both, so the last one calls them."""
        if not self.is_connected:
            return
        for callback in self._reconnect_callbacks:
            try:
                callback()
            except Exception:
                # One listener's fault must not cost the others theirs, nor the connection.
                log.exception("a reconnect callback failed")

    async def ensure_stream(self, spec: StreamSpec) -> None:
        await self._patiently(lambda: self._streams.ensure_stream(spec))

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        await self._patiently(lambda: self._streams.ensure_consumer(spec))

    async def enqueue(
        self, subject: str, data: bytes, *, message_id: str, headers: Mapping[str, str] | None = None
    ) -> int:
        return await self._streams.publish(subject, data, {**(headers or {}), "Nats-Msg-Id": message_id})

    async def pull(self, spec: ConsumerSpec, timeout_s: float) -> Delivery | None:
        return await self._streams.pull(spec, timeout_s)

    async def acknowledge(self, ack_subject: str) -> None:
        await self._streams.acknowledge(ack_subject)

    def published_at(self, ack_subject: str) -> float | None:
        try:
            return parse_ack_subject(ack_subject).published_at
        except ValueError:
            return None

    def in_progress(self, ack_subject: str) -> None:
        self._streams.in_progress(ack_subject)

    def give_back(self, ack_subject: str, delay_s: float = 0.0) -> None:
        self._streams.give_back(ack_subject, delay_s)

    async def delete(self, stream: str, stream_sequence: int) -> bool:
        return await self._streams.delete(stream, stream_sequence)

    async def holds(self, stream: str, stream_sequence: int) -> bool:
        return await self._streams.holds(stream, stream_sequence)

    async def clock(self, stream: str) -> float:
        return await self._streams.clock(stream)

    async def read(self, stream: str, subject: str, limit: int, from_sequence: int = 1) -> list[Message]:
        return await self._streams.read(stream, subject, limit, from_sequence)

    async def last(self, stream: str, subject: str) -> Message | None:
        return await self._streams.last(stream, subject)

    async def queue_depth(self, spec: ConsumerSpec) -> QueueDepth:
        return await self._streams.queue_depth(spec)

    async def queue_depths(self, stream: str) -> dict[str, QueueDepth]:
        return await self._streams.queue_depths(stream)

    async def remove_consumer(self, stream: str, name: str) -> None:
        await self._streams.remove_consumer(stream, name)

    async def num_messages(self, stream: str) -> int:
        return await self._streams.num_messages(stream)

    async def made_at(self, stream: str) -> float:
        return await self._streams.made_at(stream)

    async def purge(self, stream: str, subject: str) -> None:
        await self._streams.purge(stream, subject)

    async def ensure_bucket(self, spec: BucketSpec) -> None:
        await self._patiently(lambda: self._buckets.ensure_bucket(spec))

    async def get(self, bucket: str, key: str) -> Entry | None:
        return await self._buckets.get(bucket, key)

    async def create(self, bucket: str, key: str, value: bytes) -> int:
        return await self._buckets.create(bucket, key, value)

    async def update(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        return await self._buckets.update(bucket, key, value, revision)

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        return await self._buckets.put(bucket, key, value)

    async def remove(self, bucket: str, key: str, revision: int | None = None) -> None:
        await self._buckets.remove(bucket, key, revision)

    async def entries(self, bucket: str, under: str = "") -> list[Entry]:
        return await self._buckets.entries(bucket, under)

    async def watch(self, bucket: str, handler: WatchHandler) -> Subscription:
        watch = Watch(self._store, self._streams, self._buckets, bucket, handler, self._watches.discard)
        self._watches.add(watch)
        await watch.open()
        return watch

    async def close(self) -> None:
        try:
            for watch in list(self._watches):
                await watch.close()
        finally:
            await asyncio.gather(self._core.close(), self._store.close())

    async def _patiently(self, call: Callable[[], Awaitable[None]]) -> None:
        """For calls that may be repeated."""
        await patiently(call, self._patience_s, RETRY_S)


class _Once:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def __call__(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()
