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
from headrace_shared.errors import (
    BusError,
    BusOverloaded,
    BusRefused,
    BusUnavailable,
    OutcomeUnknown,
    PayloadTooLarge,
    QueueFull,
    RevisionConflict,
)
from headrace_shared.nats_connection import NatsConnection
from headrace_shared.nats_link import Incoming
from headrace_shared.nats_pull import PullSlot
from headrace_shared.nats_stored import message_of, stored_message
from headrace_shared.subjects import DEDUPE_WINDOW_S, READ_IN_ENVELOPES, ConsumerSpec, StreamSpec

PULL_GRACE_S = 0.5
"""How long the broker's word that a pull has expired may be late."""
ACK_TIMEOUT_S = 2.0
MAX_PULL_S = 30.0
RETRY_S = 0.1
BATCH_MESSAGES = 256
BATCH_BYTES = 8 * 1024 * 1024
MAX_WAITING = 4096
"""Pulls that may wait at one consumer."""

# Error codes of the JetStream API.
CONSUMER_NOT_FOUND = 10014
WRONG_LAST_SEQUENCE = 10071
STREAM_NOT_FOUND = 10059
NO_MESSAGE = 10037
DELETE_FAILED = frozenset({10043, 10057})
MESSAGE_TOO_LARGE = 10054
TEMPORARY = frozenset({10003, 10005, 10006, 10008, 10009})
"""A cluster without a leader, or with too few members for now."""
FULL = frozenset({10077, 10122})
"""Maximum messages or bytes of the stream, or messages of the subject."""

log = structlog.get_logger(__name__)


class AckSubject(NamedTuple):
    """What the broker tells in the subject that settles a message."""

    stream: str
    num_delivered: int
    stream_sequence: int
    consumer_sequence: int
    published_at: float
    num_pending: int


def parse_ack_subject(subject: str) -> AckSubject:
    """Both forms: with 9 tokens, or with domain and account before the stream. Raises ValueError."""
    tokens = subject.split(".")
    if len(tokens) >= 11:
        tokens = tokens[:2] + tokens[4:]
    if len(tokens) < 9 or tokens[:2] != ["$JS", "ACK"]:
        raise ValueError(f"no ack subject: {subject!r}")
    delivered, stream_sequence, consumer_sequence, nanoseconds, pending = map(int, tokens[4:9])
    return AckSubject(tokens[2], delivered, stream_sequence, consumer_sequence, nanoseconds / 1e9, pending)


class ApiOptions(NamedTuple):
    timeout_s: float
    """Of one request."""
    num_replicas: int
    """Of each stream."""
    may_make_streams: bool
    """Else others do, and we wait until they are there."""


class JetStream:
    def __init__(self, connection: NatsConnection, options: ApiOptions) -> None:
        self._connection = connection
        self._timeout_s = options.timeout_s
        self._num_replicas = options.num_replicas
        self._may_make_streams = options.may_make_streams
        self._idle_slots: dict[ConsumerSpec, list[PullSlot]] = {}
        """At most as many as pulls were ever under way at once."""

    async def api(self, call: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request of the JetStream API; the answer as it is, `error` included."""
        body = json.dumps(arguments).encode() if arguments else b""
        reply = await self._connection.request(f"$JS.API.{call}", body, timeout_s=self._timeout_s)
        answer: dict[str, Any] = json.loads(reply.data)
        return answer

    async def must(self, call: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The same, but an `error` is raised."""
        answer = await self.api(call, arguments)
        if "error" in answer:
            raise _error_of(answer, call)
        return answer

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
            }
        )

    async def ensure_stream_config(self, config: dict[str, Any]) -> None:
        name = config["name"]
        if not self._may_make_streams:
            await self._must_exist(name)
            return
        config = config | {"num_replicas": self._num_replicas}
        # Update first: the server finds a stream that is to be created too large for its memory before it sees that
        # the stream exists.
        answer = await self.api(f"STREAM.UPDATE.{name}", config)
        if answer.get("error", {}).get("err_code") == STREAM_NOT_FOUND:
            created = await self.api(f"STREAM.CREATE.{name}", config)
            # When it fails, another process may just have made it.
            answer = await self.api(f"STREAM.UPDATE.{name}", config) if "error" in created else created
            if answer.get("error", {}).get("err_code") == STREAM_NOT_FOUND:
                answer = created
        if "error" in answer:
            raise _error_of(answer, name)

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
        answer = json.loads(reply.data)
        if "error" in answer:
            raise _error_of(answer, subject, len(data))
        sequence: int = answer["seq"]
        return sequence

    async def delete(self, stream: str, stream_sequence: int) -> bool:
        answer = await self.api(f"STREAM.MSG.DELETE.{stream}", {"seq": stream_sequence, "no_erase": True})
        if "error" not in answer:
            return True
        # A message that is gone and a disk that is full look alike.
        if answer["error"].get("err_code") in DELETE_FAILED and not await self.holds(stream, stream_sequence):
            return False
        raise _error_of(answer, stream)

    async def holds(self, stream: str, stream_sequence: int) -> bool:
        """Only the stream's leader surely knows that a message is gone; but its answer would hold one that is there in
        text form, too long for the largest messages."""
        ask = json.dumps({"seq": stream_sequence}).encode()
        subject = f"$JS.API.DIRECT.GET.{stream}"
        if not (await self._connection.request(subject, ask, timeout_s=self._timeout_s)).status:
            return True
        answer = await self.api(f"STREAM.MSG.GET.{stream}", {"seq": stream_sequence})
        if answer.get("error", {}).get("err_code") == NO_MESSAGE:
            return False
        if "error" in answer:
            raise _error_of(answer, stream)
        return True

    async def clock(self, stream: str) -> float:
        answer = await self.must(f"STREAM.INFO.{stream}")
        return datetime.fromisoformat(answer["ts"]).timestamp()

    async def num_messages(self, stream: str) -> int:
        state = (await self.must(f"STREAM.INFO.{stream}"))["state"]
        num_messages: int = state["messages"]
        return num_messages

    async def purge(self, stream: str, subject: str) -> None:
        await self.must(f"STREAM.PURGE.{stream}", {"filter": subject})

    # Reading without a consumer.

    async def last(self, stream: str, subject: str) -> Message | None:
        if stream in READ_IN_ENVELOPES:
            return await self._unwrapped(stream, {"last_by_subj": subject})
        reply = await self._connection.request(
            f"$JS.API.DIRECT.GET.{stream}",
            json.dumps({"last_by_subj": subject}).encode(),
            timeout_s=self._timeout_s,
        )
        if reply.status == "404":
            return None
        return stored_message(reply)

    async def read(self, stream: str, subject: str, limit: int | None, from_sequence: int = 1) -> list[Message]:
        """At most `limit` messages, oldest first; None: all, which must be bounded by the stream's own limits."""
        messages: list[Message] = []
        sequence = from_sequence
        while limit is None or len(messages) < limit:
            count = BATCH_MESSAGES if limit is None else min(BATCH_MESSAGES, limit - len(messages))
            batch, is_end = await self._read_batch(stream, subject, sequence, count)
            messages += batch
            if is_end or not batch:
                break
            sequence = batch[-1].stream_sequence + 1
        return messages

    async def _unwrapped(self, stream: str, which: Mapping[str, Any]) -> Message | None:
        answer = await self.api(f"STREAM.MSG.GET.{stream}", which)
        if "error" not in answer:
            return message_of(answer["message"])
        if answer["error"].get("err_code") != NO_MESSAGE:
            raise _error_of(answer, stream)
        return None

    async def _read_batch(self, stream: str, subject: str, sequence: int, count: int) -> tuple[list[Message], bool]:
        """(messages, nothing is left)."""
        if stream in READ_IN_ENVELOPES:
            message = await self._unwrapped(stream, {"seq": sequence, "next_by_subj": subject})
            return ([], True) if message is None else ([message], False)
        done: asyncio.Future[Incoming | None] = asyncio.get_running_loop().create_future()
        messages: list[Message] = []

        def on_reply(reply: Incoming | None) -> None:
            if done.done():
                return
            if reply is None or reply.status:
                done.set_result(reply)
            else:
                messages.append(stored_message(reply))

        inbox = self._connection.expect(on_reply)
        ask = {"seq": sequence, "next_by_subj": subject, "batch": count, "max_bytes": BATCH_BYTES}
        try:
            await self._connection.send(f"$JS.API.DIRECT.GET.{stream}", json.dumps(ask).encode(), None, inbox)
            async with asyncio.timeout(self._timeout_s):
                reply = await done
        except TimeoutError as error:
            raise BusUnavailable(f"no answer within {self._timeout_s:g} s") from error
        finally:
            self._connection.forget(inbox)
        if reply is None:
            raise BusUnavailable("the connection broke before the answer came")
        if reply.status == "404":
            return messages, True
        if reply.status != "204":
            raise BusUnavailable(f"{stream}: {reply.status} {reply.headers.get('Description', '')}")
        return messages, reply.headers.get("Nats-Num-Pending", "0") == "0"

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
                ack = parse_ack_subject(reply.reply_to)
                return Delivery(
                    subject=reply.subject,
                    data=reply.data,
                    ack_subject=reply.reply_to,
                    stream_sequence=ack.stream_sequence,
                    num_delivered=ack.num_delivered,
                    published_at=ack.published_at,
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
        try:
            self._connection.publish(ack_subject, data)
        except (BusUnavailable, BusOverloaded):
            return  # the ack wait settles it

    async def queue_depth(self, spec: ConsumerSpec) -> QueueDepth:
        call = f"CONSUMER.INFO.{spec.stream}.{spec.name}"
        answer = await self.api(call)
        if answer.get("error", {}).get("err_code") == CONSUMER_NOT_FOUND:
            await self.ensure_consumer(spec)
            answer = await self.must(call)
        elif "error" in answer:
            raise _error_of(answer, call)
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
        if "error" in answer and answer["error"].get("err_code") != CONSUMER_NOT_FOUND:
            raise _error_of(answer, name)


def _error_of(answer: Mapping[str, Any], what: str, size: int = 0) -> BusError:
    error = answer["error"]
    description = f"{what}: {error.get('description', 'unknown error')}"
    code = error.get("err_code", 0)
    if code == WRONG_LAST_SEQUENCE:
        return RevisionConflict(description)
    if code in FULL:
        return QueueFull(description)
    if code == MESSAGE_TOO_LARGE:
        return PayloadTooLarge(size, size)
    if code in TEMPORARY:
        return BusUnavailable(description)
    return BusRefused(description)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _depth_of(info: Mapping[str, Any]) -> QueueDepth:
    return QueueDepth(info["num_pending"], info["num_ack_pending"], info["delivered"]["consumer_seq"])
