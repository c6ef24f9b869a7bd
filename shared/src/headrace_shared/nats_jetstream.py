"""Streams and work queues over the JetStream API, as plain requests on one connection."""

import asyncio
import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import structlog

from headrace_shared.bus import Delivery, Message, QueueDepth
from headrace_shared.bus_rules import check_subject, is_out_of_a_stream
from headrace_shared.errors import BusOverloaded, BusRefused, BusUnavailable, OutcomeUnknown
from headrace_shared.nats_ack import is_ack_subject, parse_ack_subject
from headrace_shared.nats_api import (
    CONSUMER_NOT_FOUND,
    DELETE_FAILED,
    STREAM_NOT_FOUND,
    JetStreamApi,
    answer_of,
    error_code,
    error_of,
)
from headrace_shared.nats_client import Incoming
from headrace_shared.nats_connection import NatsConnection
from headrace_shared.nats_pull import PullSlot
from headrace_shared.nats_reading import StreamReader
from headrace_shared.subjects import DEDUPE_WINDOW_S, ConsumerSpec, StreamSpec

PULL_GRACE_S = 0.5
"""How long the broker's word that a pull has expired may be late."""
ACK_TIMEOUT_S = 2.0
MAX_PULL_S = 30.0
RETRY_S = 0.1
MAX_TOLD = 200
"""Characters of a subject that is none: it may be of any length."""
MAX_WAITING = 4096
"""Pulls that may wait at one consumer."""

log = structlog.get_logger(__name__)


class ApiOptions(NamedTuple):
    timeout_s: float
    """Of one request."""
    num_replicas: int
    """Of each stream."""
    may_make_streams: bool
    """Else others do, and we wait until they are there."""
    reads_directly: bool
    """Else in envelopes (`nats_reading.py`)."""


class JetStream:
    def __init__(self, connection: NatsConnection, options: ApiOptions) -> None:
        self._connection = connection
        self._timeout_s = options.timeout_s
        self._api = JetStreamApi(connection, options.timeout_s)
        self._reader = StreamReader(self._api, is_direct=options.reads_directly)
        self._num_replicas = options.num_replicas
        self._may_make_streams = options.may_make_streams
        self._idle_slots: dict[ConsumerSpec, list[PullSlot]] = {}
        """At most as many as pulls were ever under way at once."""

    async def api(self, call: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request of the JetStream API; the answer as it is, `error` included."""
        return await self._api.ask(call, arguments)

    async def must(self, call: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The same, but an `error` is raised."""
        return await self._api.must(call, arguments)

    # Streams.

    async def ensure_stream(self, spec: StreamSpec) -> None:
        max_age_s = spec.max_age_s or 0.0
        await self.ensure_stream_config(
            {
                "name": spec.name,
                "subjects": list(spec.subjects),
                "retention": "workqueue" if spec.work_queue else "limits",
                # A full work queue must refuse: discarding old ones would delete requests that nobody has seen.
                "discard": "new" if spec.work_queue or spec.is_lossless else "old",
                "storage": "memory" if spec.in_memory else "file",
                "max_msgs": -1 if spec.max_messages is None else spec.max_messages,
                "max_bytes": -1 if spec.max_bytes is None else spec.max_bytes,
                "max_msgs_per_subject": -1 if spec.max_per_subject is None else spec.max_per_subject,
                "max_age": _ns(max_age_s),
                "duplicate_window": _ns(min(DEDUPE_WINDOW_S, max_age_s or DEDUPE_WINDOW_S)),
                "allow_rollup_hdrs": spec.allows_rollup,
                "deny_purge": not spec.allows_purge,
                "allow_direct": True,
            },
            # An acknowledgement names a message by its number alone: after the loss of a queue it would settle another
            # one in the queue that is made then. A number for each microsecond is more than are ever given.
            {"first_seq": time.time_ns() // 1000} if spec.work_queue else {},
        )

    async def ensure_stream_config(self, config: dict[str, Any], at_first: Mapping[str, Any] | None = None) -> None:
        """`at_first`: what it has besides if it is made now, and what is never changed."""
        name = config["name"]
        if not self._may_make_streams:
            await self._must_exist(name)
            return
        config = config | {"num_replicas": self._num_replicas}
        # Update first: the server finds a stream that is to be created too large for its memory before it sees that
        # the stream exists.
        answer = await self.api(f"STREAM.UPDATE.{name}", config)
        if error_code(answer) == STREAM_NOT_FOUND:
            created = await self.api(f"STREAM.CREATE.{name}", {**config, **(at_first or {})})
            # When it fails, another process may just have made it.
            answer = await self.api(f"STREAM.UPDATE.{name}", config) if "error" in created else created
            if error_code(answer) == STREAM_NOT_FOUND:
                answer = created
        if "error" in answer:
            raise error_of(answer, name)

    async def _must_exist(self, name: str) -> None:
        """Raises BusUnavailable as long as it is not there: somebody is about to make it."""
        try:
            await self.must(f"STREAM.INFO.{name}")
        except BusRefused as error:
            raise BusUnavailable(f"{name} is not there yet: a scheduler makes it") from error

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        """Stores a message in the stream of the subject; returns its sequence."""
        check_subject(subject)
        reply = await self._connection.request(subject, data, headers, timeout_s=self._timeout_s)
        answer = answer_of(reply)
        if "error" in answer:
            raise error_of(answer, subject, len(data))
        sequence: int = answer["seq"]
        return sequence

    async def delete(self, stream: str, stream_sequence: int) -> bool:
        answer = await self.api(f"STREAM.MSG.DELETE.{stream}", {"seq": stream_sequence, "no_erase": True})
        if "error" not in answer:
            return True
        # A message that is gone and a disk that is full look alike.
        if error_code(answer) in DELETE_FAILED and not await self.holds(stream, stream_sequence):
            return False
        raise error_of(answer, stream)

    async def clock(self, stream: str) -> float:
        return _moment((await self.must(f"STREAM.INFO.{stream}"))["ts"])

    async def num_messages(self, stream: str) -> int:
        return int((await self.must(f"STREAM.INFO.{stream}"))["state"]["messages"])

    async def state(self, stream: str) -> tuple[str, int]:
        """When it was made, in the broker's words, and the last sequence of all that was ever stored."""
        info = await self.must(f"STREAM.INFO.{stream}")
        return info["created"], info["state"]["last_seq"]

    async def made_at(self, stream: str) -> float:
        return _moment((await self.must(f"STREAM.INFO.{stream}"))["created"])

    async def purge(self, stream: str, subject: str) -> None:
        await self.must(f"STREAM.PURGE.{stream}", {"filter": subject})

    # Reading without a consumer.

    async def last(self, stream: str, subject: str) -> Message | None:
        return await self._reader.last(stream, subject)

    async def read(self, stream: str, subject: str, limit: int | None, from_sequence: int = 1) -> list[Message]:
        """At most `limit` messages, oldest first; None: all, which must be bounded by the stream's own limits."""
        return await self._reader.read(stream, subject, limit, from_sequence)

    async def newest(self, stream: str, subjects: str) -> list[Message]:
        """The last message of each of these subjects, oldest first."""
        return await self._reader.newest(stream, subjects)

    async def holds(self, stream: str, stream_sequence: int) -> bool:
        return await self._reader.holds(stream, stream_sequence)

    # Work queues.

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        config = {
            "name": spec.name,
            "durable_name": spec.name,
            "ack_policy": "explicit",
            "ack_wait": _ns(spec.ack_wait_s),
            "max_ack_pending": spec.max_ack_pending,
            "max_deliver": -1,
            "max_waiting": MAX_WAITING,
            "deliver_policy": "all",
            "replay_policy": "instant",
            "filter_subject": spec.subject,
        }
        await self.must(
            f"CONSUMER.CREATE.{spec.stream}.{spec.name}.{spec.subject}",
            {"stream_name": spec.stream, "config": config, "action": ""},
        )

    async def pull(self, spec: ConsumerSpec, timeout_s: float) -> Delivery | None:
        """As in `Bus`. One request at a time: larger batches stall, and age in our buffers."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = max(0.0, min(deadline - time.monotonic(), MAX_PULL_S, spec.ack_wait_s / 2))
            reply = await self._pull_once(spec, remaining)
            if reply is not None and reply.reply_to and is_out_of_a_stream(reply.headers):
                log.error("a message that nobody sent to the queue is taken out", subject=reply.subject)
                self._tell(reply.reply_to, b"+TERM")
            elif reply is not None and reply.reply_to:
                try:
                    ack = parse_ack_subject(reply.reply_to)
                except ValueError as error:  # the queue offers it again
                    raise BusUnavailable(f"nobody can settle a delivery: {error}") from error
                return Delivery(
                    subject=reply.subject,
                    data=reply.data,
                    ack_subject=reply.reply_to,
                    stream_sequence=ack.stream_sequence,
                    num_delivered=ack.num_delivered,
                    published_at=ack.published_at,
                    num_pending=ack.num_pending,
                )
            elif reply is not None and (reply.status == "503" or "Deleted" in reply.headers.get("Description", "")):
                await self.ensure_consumer(spec)
            elif reply is not None and reply.status == "409":
                await asyncio.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                return None

    async def _pull_once(self, spec: ConsumerSpec, expires_s: float) -> Incoming | None:
        """A message, or a status, or None. Raises BusUnavailable. What arrives is returned or given back."""
        idle = self._idle_slots.setdefault(spec, [])
        slot = idle.pop() if idle else await PullSlot.open(self._connection, self.give_back, spec.ack_wait_s)
        ask: dict[str, Any] = {"batch": 1}
        ask |= {"expires": _ns(expires_s)} if expires_s > 0.001 else {"no_wait": True}
        call = f"$JS.API.CONSUMER.MSG.NEXT.{spec.stream}.{spec.name}"
        try:
            return await slot.pull(call, json.dumps(ask).encode(), expires_s + PULL_GRACE_S)
        finally:
            if slot.may_be_lost:
                await slot.close()
            else:
                idle.append(slot)

    async def acknowledge(self, ack_subject: str) -> None:
        if not is_ack_subject(ack_subject):
            raise BusRefused(f"no message is settled by {ack_subject[:MAX_TOLD]!r}")
        try:
            await self._connection.request(ack_subject, b"+ACK", timeout_s=ACK_TIMEOUT_S)
        except (BusUnavailable, OutcomeUnknown):
            if not self._connection.is_connected:
                raise
            # The consumer that delivered it is gone (nobody listens) or was made anew (it does not answer).
            ack = parse_ack_subject(ack_subject)
            await self.delete(ack.stream, ack.stream_sequence)

    def in_progress(self, ack_subject: str) -> None:
        self._tell(ack_subject, b"+WPI")

    def give_back(self, ack_subject: str, delay_s: float) -> None:
        self._tell(ack_subject, b"-NAK" if delay_s <= 0 else b'-NAK {"delay": %d}' % _ns(delay_s))

    def _tell(self, ack_subject: str, data: bytes) -> None:
        if not is_ack_subject(ack_subject):
            log.error("no message is settled by this", subject=ack_subject[:MAX_TOLD])
            return
        try:
            self._connection.publish(ack_subject, data)
        except (BusUnavailable, BusOverloaded):
            return  # the ack wait settles it

    async def queue_depth(self, spec: ConsumerSpec) -> QueueDepth:
        call = f"CONSUMER.INFO.{spec.stream}.{spec.name}"
        answer = await self.api(call)
        if error_code(answer) == CONSUMER_NOT_FOUND:
            await self.ensure_consumer(spec)
            answer = await self.must(call)
        elif "error" in answer:
            raise error_of(answer, call)
        return _depth_of(answer)

    async def queue_depths(self, stream: str) -> dict[str, QueueDepth]:
        depths: dict[str, QueueDepth] = {}
        while True:
            answer = await self.must(f"CONSUMER.LIST.{stream}", {"offset": len(depths)})
            consumers = answer["consumers"] or []
            for info in consumers:
                depths[info["name"]] = _depth_of(info)
            if not consumers or len(depths) >= answer["total"]:
                return depths

    async def remove_consumer(self, stream: str, name: str) -> None:
        answer = await self.api(f"CONSUMER.DELETE.{stream}.{name}")
        if "error" in answer and error_code(answer) != CONSUMER_NOT_FOUND:
            raise error_of(answer, name)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _moment(told: str) -> float:
    """Raises BusUnavailable."""
    try:
        return datetime.fromisoformat(told).timestamp()
    except ValueError as error:
        raise BusUnavailable(f"the broker's answer is not readable: {error}") from error


def _depth_of(info: Mapping[str, Any]) -> QueueDepth:
    return QueueDepth(info["num_pending"], info["num_ack_pending"], info["delivered"]["consumer_seq"])
