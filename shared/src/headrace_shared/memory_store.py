"""Streams and consumers of the in-process broker."""

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict

from headrace_shared.bus import Delivery, Message, QueueDepth
from headrace_shared.errors import QueueFull
from headrace_shared.subjects import DEDUPE_WINDOW_S, ConsumerSpec, StreamSpec


def matches(pattern: str, subject: str) -> bool:
    """As in NATS: `*` is one token, `>` one or more."""
    tokens = subject.split(".")
    wanted = pattern.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(tokens) == len(wanted) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


class MemoryStream:
    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.made_at = time.time()
        self.consumers: dict[str, MemoryConsumer] = {}
        self.stored: OrderedDict[int, tuple[Message, float]] = OrderedDict()
        """sequence -> (message, when it was stored by the monotonic clock)"""
        self._num_bytes = 0
        self._next_sequence = itertools.count(1)
        self._message_ids: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._waiters: set[asyncio.Event] = set()

    def refuses(self, size: int) -> bool:
        """A stream that is full and must not drop anything. Others drop their oldest messages instead."""
        self._expire()
        return self._keeps_all and self._is_over(1, size)

    @property
    def _keeps_all(self) -> bool:
        return self.spec.work_queue or self.spec.is_lossless

    def _is_over(self, num_more: int, size: int) -> bool:
        """With `num_more` messages of `size` bytes in all added."""
        spec = self.spec
        too_many = spec.max_messages is not None and len(self.stored) + num_more > spec.max_messages
        return too_many or (spec.max_bytes is not None and self._num_bytes + size > spec.max_bytes)

    def store(self, message: Message, message_id: str | None = None) -> int:
        """Raises QueueFull."""
        if self.refuses(len(message.data)):
            raise QueueFull(f"{self.spec.name}: full")
        sequence = self.append(message)
        if message_id is not None:
            self._message_ids[message_id] = (sequence, time.monotonic())
        return sequence

    def append(self, message: Message) -> int:
        """Without a look at the limits of a work queue."""
        sequence = next(self._next_sequence)
        self.stored[sequence] = (message._replace(stream_sequence=sequence), time.monotonic())
        self._num_bytes += len(message.data)
        if self.spec.max_per_subject is not None:
            same = [s for s, (other, _) in self.stored.items() if other.subject == message.subject]
            for old in same[: -self.spec.max_per_subject]:
                self.remove(old)
        while not self._keeps_all and self._is_over(0, 0):
            self.remove(next(iter(self.stored)))
        self.changed()
        return sequence

    def find(self, message_id: str) -> int | None:
        """The sequence of a message with this id, stored lately."""
        oldest = time.monotonic() - DEDUPE_WINDOW_S
        while self._message_ids and next(iter(self._message_ids.values()))[1] < oldest:
            self._message_ids.popitem(last=False)
        known = self._message_ids.get(message_id)
        return None if known is None else known[0]

    def remove(self, sequence: int) -> bool:
        stored = self.stored.pop(sequence, None)
        if stored is None:
            return False
        self._num_bytes -= len(stored[0].data)
        for consumer in self.consumers.values():
            consumer.forget(sequence)
        return True

    def read(self, subject: str) -> list[Message]:
        self._expire()
        return [message for message, _ in self.stored.values() if matches(subject, message.subject)]

    def has(self, sequence: int) -> bool:
        self._expire()
        return sequence in self.stored

    def num_messages(self) -> int:
        self._expire()
        return len(self.stored)

    def changed(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    async def wait_for_change(self, timeout_s: float) -> None:
        waiter = asyncio.Event()
        self._waiters.add(waiter)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter.wait()
        finally:
            self._waiters.discard(waiter)

    def _expire(self) -> None:
        if self.spec.max_age_s is None:
            return
        oldest = time.monotonic() - self.spec.max_age_s
        while self.stored and next(iter(self.stored.values()))[1] < oldest:
            self.remove(next(iter(self.stored)))


class MemoryConsumer:
    def __init__(self, spec: ConsumerSpec) -> None:
        self.spec = spec
        self._next_sequence = 1
        """Messages from here on have never been delivered."""
        self._offered_at: dict[int, float] = {}
        """Delivered and unsettled: when it is offered again, by the monotonic clock."""
        self._num_delivered: dict[int, int] = {}
        self._num_deliveries = 0

    def take(self, stream: MemoryStream) -> Delivery | None:
        now = time.monotonic()
        again = sorted(s for s, at in self._offered_at.items() if at <= now)
        if again:
            return self._deliver(stream, again[0], now)
        if len(self._offered_at) >= self.spec.max_ack_pending:
            return None
        for sequence in self._fresh(stream):
            self._next_sequence = sequence + 1
            return self._deliver(stream, sequence, now)
        return None

    def next_offer_in(self, now: float) -> float:
        return max(0.0, min(self._offered_at.values(), default=now + 3600.0) - now)

    def extend(self, sequence: int) -> None:
        if sequence in self._offered_at:
            self._offered_at[sequence] = time.monotonic() + self.spec.ack_wait_s

    def offer_again(self, sequence: int, delay_s: float) -> None:
        if sequence in self._offered_at:
            self._offered_at[sequence] = time.monotonic() + delay_s

    def forget(self, sequence: int) -> None:
        self._offered_at.pop(sequence, None)
        self._num_delivered.pop(sequence, None)

    def depth(self, stream: MemoryStream) -> QueueDepth:
        return QueueDepth(len(self._fresh(stream)), len(self._offered_at), self._num_deliveries)

    def _fresh(self, stream: MemoryStream) -> list[int]:
        return [m.stream_sequence for m in stream.read(self.spec.subject) if m.stream_sequence >= self._next_sequence]

    def _deliver(self, stream: MemoryStream, sequence: int, now: float) -> Delivery:
        message, stored_at = stream.stored[sequence]
        self._offered_at[sequence] = now + self.spec.ack_wait_s
        self._num_delivered[sequence] = self._num_delivered.get(sequence, 0) + 1
        self._num_deliveries += 1
        return Delivery(
            subject=message.subject,
            data=message.data,
            ack_subject=f"ack/{self.spec.stream}/{self.spec.name}/{sequence}",
            stream_sequence=sequence,
            num_delivered=self._num_delivered[sequence],
            published_at=time.time() - (now - stored_at),
            num_pending=len(self._fresh(stream)),
        )
