"""Watching a bucket: an ephemeral push consumer of it, replaced whenever a message may have been missed."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable

import structlog

from headrace_shared.bus import Entry, Message, WatchHandler
from headrace_shared.bus_rules import is_out_of_a_stream
from headrace_shared.errors import BusError, BusUnavailable
from headrace_shared.nats_connection import NatsConnection
from headrace_shared.nats_jetstream import JetStream, parse_ack_subject
from headrace_shared.nats_kv import entry_of, is_removal
from headrace_shared.nats_link import Incoming
from headrace_shared.subjects import bucket_stream, bucket_subject
from headrace_shared.tasks import end

log = structlog.get_logger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 3.0
RETRY_S = 0.5
READY_TIMEOUT_S = 30.0
"""A cluster may have to elect a leader first."""


class Watch:
    def __init__(
        self,
        connection: NatsConnection,
        streams: JetStream,
        bucket: str,
        handler: WatchHandler,
        on_close: Callable[["Watch"], None],
    ) -> None:
        self._connection = connection
        self._streams = streams
        self._bucket = bucket
        self._handler = handler
        self._on_close = on_close
        self._consumer = ""
        self._inbox = ""
        self._known: set[str] = set()
        """Keys that the handler believes to exist."""
        self._listed: set[str] | None = None
        """Keys seen by this consumer; None once all existing ones have come."""
        self._next_sequence = 1
        self._heard = asyncio.Event()
        self._broken = False
        self._ready = asyncio.Event()
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

    async def close(self) -> None:
        self._on_close(self)
        if self._task is not None:
            await end(self._task)

    async def _follow_for_ever(self) -> None:
        while True:
            try:
                await self._follow()
            except BusError as error:
                log.debug("watching again", error=str(error), bucket=self._bucket)
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """One consumer, until something may have been missed."""
        self._broken = False
        self._listed = set()
        self._next_sequence = 1
        self._consumer = secrets.token_hex(8)
        subscription = await self._connection.listen(None, self._on_reply)
        self._inbox = subscription.subject
        on_loss = self._connection.expect(self._on_reply)
        stream = bucket_stream(self._bucket)
        try:
            answer = await self._streams.must(f"CONSUMER.CREATE.{stream}.{self._consumer}", self._create())
            # A message may be here before this answer: then it tells when the listing is complete.
            if answer["num_pending"] == 0 and answer["delivered"]["consumer_seq"] == 0:
                self._listing_done()
            while not self._broken:
                self._heard.clear()
                async with asyncio.timeout(SILENCE_S):
                    await self._heard.wait()
        except TimeoutError:
            return
        finally:
            self._connection.forget(on_loss)
            await subscription.close()
            if self._connection.is_connected:
                with contextlib.suppress(BusError):
                    call = f"$JS.API.CONSUMER.DELETE.{stream}.{self._consumer}"
                    self._connection.publish(call, b"")

    def _create(self) -> dict[str, object]:
        config = {
            "name": self._consumer,
            "deliver_subject": self._inbox,
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "filter_subject": bucket_subject(self._bucket, ">"),
            "idle_heartbeat": round(HEARTBEAT_S * 1e9),
            "inactive_threshold": round(SILENCE_S * 1e9),
            "mem_storage": True,
            "num_replicas": 1,
        }
        return {"stream_name": bucket_stream(self._bucket), "config": config, "action": "create"}

    def _on_reply(self, reply: Incoming | None) -> None:
        if self._broken:
            return
        self._heard.set()
        if reply is None:
            self._broken = True
        elif reply.status:
            last = reply.headers.get("Nats-Last-Consumer", "")
            self._broken = reply.status != "100" or last not in ("", str(self._next_sequence - 1))
        elif reply.reply_to:
            ack = parse_ack_subject(reply.reply_to)
            if ack.consumer_sequence != self._next_sequence:
                self._broken = True
                return
            self._next_sequence += 1
            message = Message(reply.subject, reply.data, reply.headers, ack.stream_sequence)
            if is_out_of_a_stream(reply.headers):
                self._ignore(message)
            else:
                self._report(message)
            if ack.num_pending == 0:
                self._listing_done()

    def _ignore(self, message: Message) -> None:
        """Nobody wrote it: somebody had the broker put it there. What was known of the key stands."""
        key = entry_of(self._bucket, message).key
        log.error("a value that nobody wrote is ignored", bucket=self._bucket, key=key)
        if self._listed is not None and key in self._known:
            self._listed.add(key)

    def _report(self, message: Message) -> None:
        entry = entry_of(self._bucket, message)
        if is_removal(message):
            self._known.discard(entry.key)
            tell(self._handler, self._bucket, None, entry.key)
            return
        self._known.add(entry.key)
        if self._listed is not None:
            self._listed.add(entry.key)
        tell(self._handler, self._bucket, entry, entry.key)

    def _listing_done(self) -> None:
        if self._listed is None:
            return
        gone = self._known - self._listed
        self._known -= gone
        self._listed = None
        for key in sorted(gone):
            tell(self._handler, self._bucket, None, key)
        self._ready.set()


def tell(handler: WatchHandler, bucket: str, entry: Entry | None, key: str) -> None:
    """A handler's fault must not end the watch."""
    try:
        handler(entry, key)
    except Exception:
        log.exception("a watch handler failed", bucket=bucket, key=key)
