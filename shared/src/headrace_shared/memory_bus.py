"""The in-process twin of the broker: `MemoryBroker` holds what it would hold, each `MemoryBus` is one connection.

For tests of the services' shells. It keeps to the contract that `NatsBus` keeps to (one test runs against both), in
one event loop, without persistence. `stop` and `start` play an outage in which nothing is lost that is stored.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from headrace_shared.bus import Delivery, Entry, Handler, Message, QueueDepth, WatchHandler
from headrace_shared.bus_rules import HEADER_ROOM, check_size, check_subject
from headrace_shared.errors import BusRefused, BusUnavailable, RevisionConflict
from headrace_shared.memory_store import MemoryConsumer, MemoryStream, matches
from headrace_shared.subjects import BucketSpec, ConsumerSpec, StreamSpec, bucket_key, bucket_stream, bucket_subject

MAX_PAYLOAD = 1024 * 1024 - HEADER_ROOM


class MemoryBroker:
    def __init__(self, max_payload: int = MAX_PAYLOAD) -> None:
        self.max_payload = max_payload
        self.is_up = True
        self.streams: dict[str, MemoryStream] = {}
        self.subscriptions: list[MemorySubscription] = []
        self.buses: list[MemoryBus] = []

    def stop(self) -> None:
        """From now on nobody is connected."""
        self.is_up = False
        for bus in self.buses:
            bus.went_down()
        self.wake_pulls()

    def start(self) -> None:
        self.is_up = True
        for bus in self.buses:
            bus.came_up()

    def wake_pulls(self) -> None:
        """So that they see that they are disconnected."""
        for stream in self.streams.values():
            stream.changed()

    def deliver(self, message: Message) -> None:
        """To whoever is subscribed, in order, each in a callback of its own."""
        loop = asyncio.get_running_loop()
        for subscription in self.subscriptions:
            if matches(subscription.subject, message.subject):
                loop.call_soon(subscription.deliver, message)

    def stream_for(self, subject: str) -> MemoryStream | None:
        for stream in self.streams.values():
            if any(matches(pattern, subject) for pattern in stream.spec.subjects):
                return stream
        return None

    def stream(self, name: str) -> MemoryStream:
        if name not in self.streams:
            raise BusRefused(f"no stream {name}")
        return self.streams[name]


class MemorySubscription:
    def __init__(self, broker: MemoryBroker, bus: "MemoryBus", subject: str, handler: Handler) -> None:
        self._broker = broker
        self.bus = bus
        self.subject = subject
        self._handler = handler
        self._is_open = True

    def deliver(self, message: Message) -> None:
        if self._is_open and self.bus.is_connected:
            self._handler(message)

    async def close(self) -> None:
        self._is_open = False
        if self in self._broker.subscriptions:
            self._broker.subscriptions.remove(self)


class MemoryBus:
    """Implements `Bus`. Without a broker it gets one of its own."""

    def __init__(self, broker: MemoryBroker | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self.broker.buses.append(self)
        self._is_closed = False
        self._down_since = 0.0
        self._callbacks: list[Callable[[], None]] = []

    # State.

    @property
    def is_connected(self) -> bool:
        return self.broker.is_up and not self._is_closed

    @property
    def disconnected_for_s(self) -> float:
        return 0.0 if self.is_connected else time.monotonic() - self._down_since

    @property
    def max_payload(self) -> int:
        return self.broker.max_payload

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def went_down(self) -> None:
        """The broker's side of an outage."""
        self._down_since = time.monotonic()

    def came_up(self) -> None:
        for callback in self._callbacks:
            callback()

    def _check(self, data: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        if not self.is_connected:
            raise BusUnavailable("not connected to the broker")
        check_size(data, headers, self.max_payload, HEADER_ROOM)

    # Core messages.

    def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._check(data, headers)
        check_subject(subject)
        message = Message(subject, data, dict(headers or {}))
        stream = self.broker.stream_for(subject)
        if stream is not None and not stream.refuses(len(data)):
            stream.append(message)
        self.broker.deliver(message)

    async def subscribe(self, subject: str, handler: Handler) -> MemorySubscription:
        self._check()
        subscription = MemorySubscription(self.broker, self, subject, handler)
        self.broker.subscriptions.append(subscription)
        return subscription

    # Streams and work queues.

    async def ensure_stream(self, spec: StreamSpec) -> None:
        self._check()
        stream = self.broker.streams.setdefault(spec.name, MemoryStream(spec))
        stream.spec = spec

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        self._check()
        self.broker.stream(spec.stream).consumers.setdefault(spec.name, MemoryConsumer(spec))

    async def enqueue(
        self, subject: str, data: bytes, *, message_id: str, headers: Mapping[str, str] | None = None
    ) -> int:
        self._check(data, headers)
        check_subject(subject)
        stream = self.broker.stream_for(subject)
        if stream is None:
            raise BusRefused(f"no stream for {subject}")
        known = stream.find(message_id)
        if known is not None:
            return known
        message = Message(subject, data, {**(headers or {}), "Nats-Msg-Id": message_id})
        sequence = stream.store(message, message_id)
        self.broker.deliver(message)
        return sequence

    async def pull(self, spec: ConsumerSpec, timeout_s: float) -> Delivery | None:
        await self.ensure_consumer(spec)
        deadline = time.monotonic() + timeout_s
        while True:
            self._check()
            stream = self.broker.stream(spec.stream)
            consumer = stream.consumers.setdefault(spec.name, MemoryConsumer(spec))
            delivery = consumer.take(stream)
            if delivery is not None:
                return delivery
            now = time.monotonic()
            if now >= deadline:
                return None
            await stream.wait_for_change(min(deadline - now, consumer.next_offer_in(now)))

    async def acknowledge(self, ack_subject: str) -> None:
        self._check()
        stream, consumer, sequence = self._settled(ack_subject)
        if consumer is not None:
            consumer.forget(sequence)
        stream.remove(sequence)

    def published_at(self, ack_subject: str) -> float | None:
        try:
            stream, _, sequence = self._settled(ack_subject)
        except BusRefused:
            return None
        stored = stream.stored.get(sequence)
        return None if stored is None else time.time() - (time.monotonic() - stored[1])

    def in_progress(self, ack_subject: str) -> None:
        with contextlib.suppress(BusRefused):
            _, consumer, sequence = self._settled(ack_subject)
            if self.is_connected and consumer is not None:
                consumer.extend(sequence)

    def give_back(self, ack_subject: str, delay_s: float = 0.0) -> None:
        with contextlib.suppress(BusRefused):
            stream, consumer, sequence = self._settled(ack_subject)
            if self.is_connected and consumer is not None:
                consumer.offer_again(sequence, delay_s)
                stream.changed()

    def _settled(self, ack_subject: str) -> tuple[MemoryStream, MemoryConsumer | None, int]:
        if ack_subject.count("/") != 3:
            raise BusRefused(f"no message is settled by {ack_subject!r}")
        _, name, consumer, sequence = ack_subject.split("/")
        stream = self.broker.stream(name)
        return stream, stream.consumers.get(consumer), int(sequence)

    async def delete(self, stream: str, stream_sequence: int) -> bool:
        self._check()
        return self.broker.stream(stream).remove(stream_sequence)

    async def holds(self, stream: str, stream_sequence: int) -> bool:
        self._check()
        return self.broker.stream(stream).has(stream_sequence)

    async def clock(self, stream: str) -> float:
        self._check()
        self.broker.stream(stream)
        return time.time()

    async def read(self, stream: str, subject: str, limit: int, from_sequence: int = 1) -> list[Message]:
        self._check()
        messages = self.broker.stream(stream).read(subject)
        return [message for message in messages if message.stream_sequence >= from_sequence][:limit]

    async def last(self, stream: str, subject: str) -> Message | None:
        self._check()
        messages = self.broker.stream(stream).read(subject)
        return messages[-1] if messages else None

    async def queue_depth(self, spec: ConsumerSpec) -> QueueDepth:
        await self.ensure_consumer(spec)
        stream = self.broker.stream(spec.stream)
        return stream.consumers[spec.name].depth(stream)

    async def queue_depths(self, stream: str) -> dict[str, QueueDepth]:
        self._check()
        found = self.broker.stream(stream)
        return {name: consumer.depth(found) for name, consumer in found.consumers.items()}

    async def remove_consumer(self, stream: str, name: str) -> None:
        self._check()
        self.broker.stream(stream).consumers.pop(name, None)

    async def num_messages(self, stream: str) -> int:
        self._check()
        return self.broker.stream(stream).num_messages()

    async def made_at(self, stream: str) -> float:
        self._check()
        return self.broker.stream(stream).made_at

    async def purge(self, stream: str, subject: str) -> None:
        self._check()
        found = self.broker.stream(stream)
        for message in found.read(subject):
            found.remove(message.stream_sequence)

    # Key-value buckets.

    async def ensure_bucket(self, spec: BucketSpec) -> None:
        stream = StreamSpec(
            bucket_stream(spec.name),
            (bucket_subject(spec.name, ">"),),
            in_memory=True,
            max_bytes=spec.max_bytes,
            max_age_s=spec.ttl_s,
            max_per_subject=1,
        )
        await self.ensure_stream(stream)

    async def get(self, bucket: str, key: str) -> Entry | None:
        message = await self.last(bucket_stream(bucket), bucket_subject(bucket, key))
        return None if message is None else _entry_of(bucket, message)

    async def create(self, bucket: str, key: str, value: bytes) -> int:
        return await self.update(bucket, key, value, 0)

    async def update(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        current = await self.get(bucket, key)
        if (current.revision if current is not None else 0) != revision:
            raise RevisionConflict(f"{bucket}/{key}: the revision is not {revision}")
        return await self.put(bucket, key, value)

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        self._check(value)
        message = Message(bucket_subject(bucket, key), value)
        check_subject(message.subject)
        stream = self.broker.stream(bucket_stream(bucket))
        sequence = stream.store(message)
        self.broker.deliver(message._replace(stream_sequence=sequence))
        if stream.spec.max_age_s is not None:
            asyncio.get_running_loop().call_later(stream.spec.max_age_s, self._expire, stream, message, sequence)
        return sequence

    def _expire(self, stream: MemoryStream, message: Message, sequence: int) -> None:
        if stream.remove(sequence):
            self.broker.deliver(Message(message.subject, b"", {"KV-Operation": "DEL"}))

    async def remove(self, bucket: str, key: str, revision: int | None = None) -> None:
        current = await self.get(bucket, key)
        if current is None:
            return
        if revision is not None and current.revision != revision:
            raise RevisionConflict(f"{bucket}/{key}: the revision is not {revision}")
        self.broker.stream(bucket_stream(bucket)).remove(current.revision)
        self.broker.deliver(Message(bucket_subject(bucket, key), b"", {"KV-Operation": "DEL"}))

    async def entries(self, bucket: str, under: str = "") -> list[Entry]:
        keys = f"{under}.>" if under else ">"
        messages = await self.read(bucket_stream(bucket), bucket_subject(bucket, keys), 1_000_000)
        return [_entry_of(bucket, message) for message in messages]

    async def watch(self, bucket: str, handler: WatchHandler) -> MemorySubscription:
        def on_message(message: Message) -> None:
            entry = _entry_of(bucket, message)
            handler(None if "KV-Operation" in message.headers else entry, entry.key)

        known = await self.entries(bucket)
        subscription = await self.subscribe(bucket_subject(bucket, ">"), on_message)
        for entry in known:
            handler(entry, entry.key)
        return subscription

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._down_since = time.monotonic()
            self.broker.buses.remove(self)
            self.broker.wake_pulls()
            self.broker.subscriptions = [s for s in self.broker.subscriptions if s.bus is not self]


def _entry_of(bucket: str, message: Message) -> Entry:
    return Entry(bucket_key(bucket, message.subject), message.data, message.stream_sequence)
