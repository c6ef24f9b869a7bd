"""Watching a bucket without a consumer: the broker tells what it has stored, with its place in the stream.

Places follow each other, so that whoever misses one knows it, and lists the bucket again. Who may make a consumer may
have the broker deliver it to anybody; so nobody does who need not (`broker_permissions.py`).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from headrace_shared.beats import until_beat
from headrace_shared.bus import Entry, WatchHandler
from headrace_shared.errors import BusError, BusRefused, BusUnavailable
from headrace_shared.nats_client import Incoming
from headrace_shared.nats_connection import NatsConnection
from headrace_shared.nats_jetstream import JetStream
from headrace_shared.nats_kv import KeyValue, is_removal
from headrace_shared.subjects import bucket_stream, stored_key, stored_subject
from headrace_shared.tasks import end

log = structlog.get_logger(__name__)

CHECK_S = 2.0
"""How often we ask whether something was stored that we were not told of."""
GRACE_S = 0.5
"""How long what was stored may be on its way."""
RETRY_S = 0.5
READY_TIMEOUT_S = 120.0
"""A cluster may have to elect a leader first."""
HANDLED_AT_ONCE = 64
"""Of many keys, before others on the event loop have their turn."""
MAX_EARLY = 10_000
"""Changes while the bucket is listed. With more it is listed again."""


class _Change(NamedTuple):
    entry: Entry
    is_removal: bool


class Watch:
    def __init__(
        self,
        connection: NatsConnection,
        streams: JetStream,
        buckets: KeyValue,
        bucket: str,
        handler: WatchHandler,
        on_close: Callable[["Watch"], None],
    ) -> None:
        self._connection = connection
        self._streams = streams
        self._buckets = buckets
        self._bucket = bucket
        self._stream = bucket_stream(bucket)
        self._handler = handler
        self._on_close = on_close
        self._known: dict[str, int] = {}
        """Revisions of the keys that the handler believes to exist."""
        self._early: list[_Change] | None = None
        """What came while the bucket was listed; None when it is not."""
        self._next = 1
        """The place that the next change will have."""
        self._made_at = ""
        """When the stream was made: one that was lost may have been made again, and have come as far."""
        self._broken = asyncio.Event()
        """Something was missed, or may have been."""
        self._ready = asyncio.Event()
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Returns when the handler has got every key that exists. Raises BusUnavailable."""
        self._task = asyncio.create_task(self._follow_for_ever(), name=f"watch-{self._bucket}")
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._ready.wait()
        except TimeoutError as error:
            await self.close()
            raise BusUnavailable(f"cannot watch {self._bucket}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        if self._is_closed:
            raise BusUnavailable(f"closed while {self._bucket} was read")

    async def close(self) -> None:
        self._is_closed = True
        self._ready.set()
        self._on_close(self)
        if self._task is not None:
            await end(self._task)

    async def _follow_for_ever(self) -> None:
        while True:
            try:
                await self._follow()
            except BusError as error:
                log.debug("watching again", error=str(error), bucket=self._bucket)
            except Exception:
                # Nobody else would notice that nothing is heard any more.
                log.exception("watching again", bucket=self._bucket)
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """Lists the bucket and reports its changes, until something was missed."""
        self._broken.clear()
        self._early = []
        subscription = await self._connection.listen(stored_subject(self._bucket, ">"), self._on_stored)
        on_loss = self._connection.expect(lambda _: self._broken.set())
        try:
            await self._list()
            while not await self._breaks_within(until_beat(CHECK_S, time.monotonic())):
                await self._check()
        finally:
            self._connection.forget(on_loss)
            await subscription.close()

    async def _breaks_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._broken.wait()
        return self._broken.is_set()

    async def _list(self) -> None:
        made_at, last = await self._streams.state(self._stream)
        if made_at != self._made_at:
            self._made_at, self._known = made_at, dict.fromkeys(self._known, 0)
        entries = {entry.key: entry for entry in await self._buckets.entries(self._bucket, "")}
        for key in sorted(self._known.keys() - entries.keys()):
            self._report(None, key)
        for number, entry in enumerate(entries.values()):
            if self._known.get(entry.key) != entry.revision:
                self._report(entry, entry.key)
            if number % HANDLED_AT_ONCE == 0:
                await asyncio.sleep(0)
        early, self._early, self._next = self._early or [], None, last + 1
        for change in early:
            self._apply(change)
        self._ready.set()

    async def _check(self) -> None:
        """Raises BusRefused where the bucket is gone."""
        try:
            made_at, last = await self._streams.state(self._stream)
        except BusRefused:
            raise
        except BusError as error:
            # If the connection is lost, we hear of it.
            log.debug("cannot check a watch", error=str(error), bucket=self._bucket)
            return
        if last >= self._next:
            await self._breaks_within(GRACE_S)
        if last >= self._next or last < self._next - 1 or made_at != self._made_at:
            self._broken.set()

    def _on_stored(self, message: Incoming) -> None:
        place = message.headers.get("Nats-Sequence", "")
        if not place.isdecimal():
            # Not of the stream: somebody had the broker answer here.
            log.error("what nobody has stored is ignored", bucket=self._bucket, subject=message.subject)
            return
        entry = Entry(stored_key(self._bucket, message.subject), message.data, int(place))
        change = _Change(entry, is_removal(message.headers))
        if self._early is None:
            self._apply(change)
        elif len(self._early) < MAX_EARLY:
            self._early.append(change)
        else:
            self._broken.set()

    def _apply(self, change: _Change) -> None:
        entry = change.entry
        if self._broken.is_set() or entry.revision < self._next:
            return
        if entry.revision > self._next:
            self._broken.set()
            return
        self._next += 1
        # The listing may have been ahead.
        if entry.revision > self._known.get(entry.key, 0):
            self._report(None if change.is_removal else entry, entry.key)

    def _report(self, entry: Entry | None, key: str) -> None:
        if entry is None:
            self._known.pop(key, None)
        else:
            self._known[key] = entry.revision
        try:
            self._handler(entry, key)
        except Exception:
            # A handler's fault must not end the watch.
            log.exception("a watch handler failed", bucket=self._bucket, key=key)
