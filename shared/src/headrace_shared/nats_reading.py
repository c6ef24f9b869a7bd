"""Reading streams without a consumer: directly, or in envelopes.

A direct answer is the message as it was stored, many to a call; in an envelope it is text inside the JSON of an answer
of the API, one to a call. The broker sends an answer wherever it is told to, so that who may write something and read
it directly could have it said anywhere; that is why most users may not (`broker_permissions.py`).
"""

import asyncio
import contextlib
import json
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from headrace_shared.bus import Message
from headrace_shared.errors import BusUnavailable, OutcomeUnknown
from headrace_shared.nats_api import NO_MESSAGE, JetStreamApi, error_code, error_of
from headrace_shared.nats_client import Incoming
from headrace_shared.nats_stored import message_of, stored_message

BATCH_MESSAGES = 256
BATCH_BYTES = 8 * 1024 * 1024
MAX_AT_ONCE = 64
"""Calls for envelopes: the broker drops all calls when 10,000 of them wait, and answers may hold a megabyte."""
NUM_CHAINS = 8
"""The stream is read in so many places at once, since the next message is known only by the one before."""
FEW = 8
"""So many messages are read one after the other."""

T = TypeVar("T")


class _NotDirectly(BusUnavailable):
    """Nobody answers for the stream: an earlier version has made it, and no scheduler has changed it yet; or nobody
    leads it."""


class StreamReader:
    """Raises BusError; where no answer comes, BusUnavailable, since nothing can have been done."""

    def __init__(self, api: JetStreamApi, *, is_direct: bool) -> None:
        self._api = api
        self._is_direct = is_direct
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def holds(self, stream: str, sequence: int) -> bool:
        # Only the stream's leader surely knows that a message is gone; but its answer would hold one that is there.
        with contextlib.suppress(_NotDirectly):
            if self._is_direct and not (await self._ask_directly(stream, {"seq": sequence})).status:
                return True
        return await self._unwrapped(stream, {"seq": sequence}) is not None

    async def last(self, stream: str, subject: str) -> Message | None:
        if not self._is_direct:
            return await self._unwrapped(stream, {"last_by_subj": subject})
        try:
            reply = await self._ask_directly(stream, {"last_by_subj": subject})
        except _NotDirectly:
            return await self._unwrapped(stream, {"last_by_subj": subject})
        return None if reply.status == "404" else stored_message(reply)

    async def read(self, stream: str, subject: str, limit: int | None, from_sequence: int = 1) -> list[Message]:
        """At most `limit` messages, oldest first; None: all, which must be bounded by the stream's own limits. What is
        stored meanwhile may be among them."""
        if not self._is_direct:
            return await self._read_envelopes(stream, subject, limit, from_sequence)
        messages: list[Message] = []
        sequence = from_sequence
        while limit is None or len(messages) < limit:
            count = BATCH_MESSAGES if limit is None else min(BATCH_MESSAGES, limit - len(messages))
            try:
                batch, is_end = await self._read_batch(stream, subject, sequence, count)
            except _NotDirectly:
                return await self._read_envelopes(stream, subject, limit, from_sequence)
            messages += batch
            if is_end or not batch:
                break
            sequence = batch[-1].stream_sequence + 1
        return messages

    async def newest(self, stream: str, subjects: str) -> list[Message]:
        """The last message of each subject, oldest first; what is replaced meanwhile as it was, or as it is."""
        if self._is_direct:
            found = await self.read(stream, subjects, None)
        else:
            found = []
            names = await self._subjects(stream, subjects)
            for start in range(0, len(names), BATCH_MESSAGES):
                asking = (self.last(stream, name) for name in names[start : start + BATCH_MESSAGES])
                found += [message for message in await _all_of(asking) if message is not None]
        messages = {message.subject: message for message in found}
        return sorted(messages.values(), key=lambda message: message.stream_sequence)

    # In envelopes.

    async def _subjects(self, stream: str, subjects: str) -> list[str]:
        """Which subjects the stream has messages of. In a bucket that changes all the time, reading on for as long as
        there is something would have no end, and not reading on would miss what has moved."""
        names: list[str] = []
        while True:
            info = await self._api.must(f"STREAM.INFO.{stream}", {"subjects_filter": subjects, "offset": len(names)})
            told = info["state"].get("subjects") or {}
            names += told
            if not told or len(names) >= info.get("total", 0):
                return names

    async def _read_envelopes(self, stream: str, subject: str, limit: int | None, from_sequence: int) -> list[Message]:
        messages = await self._chain(stream, subject, from_sequence, None, FEW if limit is None else min(limit, FEW))
        if len(messages) < FEW or len(messages) == limit:
            return messages
        start, left = messages[-1].stream_sequence + 1, None if limit is None else limit - len(messages)
        last = await self._unwrapped(stream, {"last_by_subj": subject})
        if last is None:  # gone meanwhile, or the broker knows no last one of such a pattern
            return messages + await self._chain(stream, subject, start, None, left)
        end = last.stream_sequence
        step = max(1, -(-(end + 1 - start) // NUM_CHAINS))
        chains = (
            self._chain(stream, subject, first, min(end, first + step - 1), left)
            for first in range(start, end + 1, step)
        )
        for piece in await _all_of(chains):
            messages += piece
        return messages[:limit]

    async def _chain(self, stream: str, subject: str, first: int, end: int | None, limit: int | None) -> list[Message]:
        """From `first` to `end`, at most `limit`, one by one."""
        messages: list[Message] = []
        while (end is None or first <= end) and (limit is None or len(messages) < limit):
            message = await self._unwrapped(stream, {"seq": first, "next_by_subj": subject})
            if message is None or (end is not None and message.stream_sequence > end):
                break
            messages.append(message)
            first = message.stream_sequence + 1
        return messages

    async def _unwrapped(self, stream: str, which: Mapping[str, Any]) -> Message | None:
        async with self._turns:
            try:
                answer = await self._api.ask(f"STREAM.MSG.GET.{stream}", which)
            except OutcomeUnknown as error:
                raise BusUnavailable(str(error)) from error
        if "error" not in answer:
            return message_of(answer["message"])
        if error_code(answer) != NO_MESSAGE:
            raise error_of(answer, stream)
        return None

    # Directly.

    async def _ask_directly(self, stream: str, which: Mapping[str, Any]) -> Incoming:
        call, ask = f"$JS.API.DIRECT.GET.{stream}", json.dumps(which).encode()
        try:
            return await self._api.connection.request(call, ask, timeout_s=self._api.timeout_s)
        except BusUnavailable as error:
            raise _NotDirectly(str(error)) from error
        except OutcomeUnknown as error:
            raise BusUnavailable(str(error)) from error

    async def _read_batch(self, stream: str, subject: str, sequence: int, count: int) -> tuple[list[Message], bool]:
        """(messages, nothing is left)."""
        ask = {"seq": sequence, "next_by_subj": subject, "batch": count, "max_bytes": BATCH_BYTES}
        call, api = f"$JS.API.DIRECT.GET.{stream}", self._api
        try:
            replies, reply = await api.connection.request_many(call, json.dumps(ask).encode(), timeout_s=api.timeout_s)
        except OutcomeUnknown as error:
            raise BusUnavailable(str(error)) from error
        messages = [stored_message(each) for each in replies]
        if reply.status == "404":
            return messages, True
        if reply.status == "503":
            raise _NotDirectly(stream)
        if reply.status != "204":
            raise BusUnavailable(f"{stream}: {reply.status} {reply.headers.get('Description', '')}")
        return messages, reply.headers.get("Nats-Num-Pending", "0") == "0"


async def _all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order. Raises the first error when all have ended."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    done = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done
