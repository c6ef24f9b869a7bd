"""The broker as the services see it: a Protocol with two implementations that pass one contract test.

`nats_bus.NatsBus` is the real one, `memory_bus.MemoryBus` its in-process twin for tests of the shells.

Rules of use, each learnt from the broker's behaviour:
- `publish` never waits: it puts the message into a bounded queue that one task sends from, in order.
- Subscription callbacks run on the event loop, one after the other, and must not wait: hand over to a queue.
- Everything else is bounded by `timeout_s` and raises a `BusError`; none of it can swallow a cancellation.
- A connection that is closed for good calls `on_closed` once; the process must then exit.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from headrace_shared.subjects import BucketSpec, ConsumerSpec, StreamSpec


class Message(NamedTuple):
    subject: str
    data: bytes
    headers: Mapping[str, str] = {}
    stream_sequence: int = 0
    """Position in the stream, for messages read from one."""


class Delivery(NamedTuple):
    """A message of a work queue; owned by the receiver until acknowledged, or `ack_wait_s` after a sign of life."""

    subject: str
    data: bytes
    ack_subject: str
    """Settles the message, from whichever process; the owner travels with it."""
    stream_sequence: int
    num_delivered: int
    """1 for the first time."""
    published_at: float
    """Seconds since the epoch by the broker's clock. For display and for comparison with itself only."""
    num_pending: int = 0
    """Messages for the same consumer that had not been delivered to anybody then."""


class Entry(NamedTuple):
    """A value of a key-value bucket. Revisions rise with every change of the bucket."""

    key: str
    value: bytes
    revision: int


class QueueDepth(NamedTuple):
    num_pending: int
    """Not yet delivered."""
    num_unacknowledged: int
    """Delivered and neither acknowledged nor offered again."""
    num_delivered: int = 0
    """Deliveries since the consumer was made, those of a message that is offered again too. Only grows."""


Handler = Callable[[Message], None]
WatchHandler = Callable[[Entry | None, str], None]
"""(entry, key); entry is None for a removed key."""


class Subscription(Protocol):
    async def close(self) -> None: ...


class Bus(Protocol):
    @property
    def is_connected(self) -> bool:
        """The broker has answered lately (a hung broker is not connected, though the socket is open)."""
        ...

    @property
    def disconnected_for_s(self) -> float:
        """Seconds since the broker last answered while disconnected; 0.0 while connected."""
        ...

    @property
    def max_payload(self) -> int:
        """Largest `data` that any publish accepts; headers have room of their own."""
        ...

    # Core messages: at most once.

    def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Sends soon. Raises BusOverloaded if the send queue is full, BusUnavailable while disconnected,
        PayloadTooLarge. May be lost without a trace if the connection breaks afterwards."""
        ...

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """`handler` gets every message from when this returns. Survives reconnects; what was sent meanwhile is lost."""
        ...

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """`callback` runs after each reconnect, when subscriptions are active again: messages may have been missed."""
        ...

    # Streams and work queues.

    async def ensure_stream(self, spec: StreamSpec) -> None: ...

    async def ensure_consumer(self, spec: ConsumerSpec) -> None: ...

    async def enqueue(
        self, subject: str, data: bytes, *, message_id: str, headers: Mapping[str, str] | None = None
    ) -> int:
        """Stores a message in the stream of `subject`; returns its sequence once the broker has it. With the same
        `message_id` within DEDUPE_WINDOW_S it is stored once. Raises QueueFull, PayloadTooLarge, BusUnavailable (it
        was not sent) or OutcomeUnknown (it may be stored, now or later)."""
        ...

    async def pull(self, spec: ConsumerSpec, timeout_s: float) -> Delivery | None:
        """Takes one message, or None after `timeout_s`. Recreates a consumer that was deleted. BusUnavailable."""
        ...

    async def acknowledge(self, ack_subject: str) -> None:
        """Removes the message for good, and waits for the broker to say so. BusUnavailable, OutcomeUnknown. BusRefused
        if this is no subject that settles a message: it may have passed through others' hands."""
        ...

    def published_at(self, ack_subject: str) -> float | None:
        """As in `Delivery`; None if it is not known."""
        ...

    def in_progress(self, ack_subject: str) -> None:
        """Restarts the message's ack wait. Errors are silent: the next sign of life is soon. Nothing is sent where no
        message is settled; so it is with `give_back`."""
        ...

    def give_back(self, ack_subject: str, delay_s: float = 0.0) -> None:
        """The message is offered again after `delay_s`."""
        ...

    async def delete(self, stream: str, stream_sequence: int) -> bool:
        """Deletes a message. False if it was gone."""
        ...

    async def holds(self, stream: str, stream_sequence: int) -> bool:
        """Whether the stream still has this message."""
        ...

    async def clock(self, stream: str) -> float:
        """Seconds since the epoch by the clock that stamps the stream's messages, as in `Delivery.published_at`."""
        ...

    async def read(self, stream: str, subject: str, limit: int, from_sequence: int = 1) -> list[Message]:
        """The messages of one subject that the stream still holds, oldest first, from this position in the stream on,
        at most `limit`."""
        ...

    async def last(self, stream: str, subject: str) -> Message | None: ...

    async def queue_depth(self, spec: ConsumerSpec) -> QueueDepth: ...

    async def queue_depths(self, stream: str) -> dict[str, QueueDepth]:
        """Of all consumers of a stream, by their names."""
        ...

    async def remove_consumer(self, stream: str, name: str) -> None:
        """What it had delivered is offered to others. No error if there is none."""
        ...

    async def num_messages(self, stream: str) -> int: ...

    async def made_at(self, stream: str) -> float:
        """Seconds since the epoch by the broker's clock. Another time: the broker had lost it and all that it held."""
        ...

    async def purge(self, stream: str, subject: str) -> None:
        """Deletes all messages of a subject. No error if there is none."""
        ...

    # Key-value buckets.

    async def ensure_bucket(self, spec: BucketSpec) -> None: ...

    async def get(self, bucket: str, key: str) -> Entry | None: ...

    async def create(self, bucket: str, key: str, value: bytes) -> int:
        """Returns the revision. Raises RevisionConflict if the key exists."""
        ...

    async def update(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        """Raises RevisionConflict unless `revision` is the key's current one."""
        ...

    async def put(self, bucket: str, key: str, value: bytes) -> int: ...

    async def remove(self, bucket: str, key: str, revision: int | None = None) -> None:
        """Raises RevisionConflict if `revision` is given and not current. No error if the key is absent."""
        ...

    async def entries(self, bucket: str, under: str = "") -> list[Entry]:
        """All, or those whose key begins with `under` and a dot."""
        ...

    async def watch(self, bucket: str, handler: WatchHandler) -> Subscription:
        """Calls `handler(entry, key)` for every key now and at each change; entry is None for a removed key. After a
        reconnect all keys may be reported again."""
        ...

    async def close(self) -> None:
        """Sends what is queued (bounded by a second) and disconnects. Idempotent."""
        ...
