"""What is read in envelopes is what is read directly."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import pytest

from headrace_shared.errors import BusError
from headrace_shared.nats_api import NO_MESSAGE, JetStreamApi
from headrace_shared.nats_bus import NatsBus
from headrace_shared.nats_reading import FEW, MAX_AT_ONCE, StreamReader
from headrace_shared.subjects import StreamSpec, bucket_stream, bucket_subject

LOG = StreamSpec("LOG", ("log.*",), in_memory=True, max_messages=10_000, max_age_s=60.0)


def readers(bus: NatsBus) -> tuple[StreamReader, StreamReader]:
    """In envelopes, and directly."""
    api = JetStreamApi(bus._store, 5.0)
    return StreamReader(api, is_direct=False), StreamReader(api, is_direct=True)


@pytest.mark.nats
async def test_both_ways_tell_the_same(bus: NatsBus) -> None:
    enveloped, direct = readers(bus)
    await bus.ensure_stream(LOG)
    largest = os.urandom(bus.max_payload)
    for number in range(120):
        headers = {"h": f"é{number}", "Nats-TTL-like": "x"} if number % 2 else None
        await bus.enqueue(
            f"log.{number % 3}", largest if number == 60 else b"%d" % number, message_id=str(number), headers=headers
        )
    for sequence in (2, 3, 50, 117, 118, 120):
        assert await bus.delete("LOG", sequence)
    for subject in ("log.0", "log.1", "log.*", ">", "log.none"):
        assert await enveloped.last("LOG", subject) == await direct.last("LOG", subject)
        for limit in (None, 1, FEW, FEW + 1, 20):
            for start in (1, 59, 500):
                expected = await direct.read("LOG", subject, limit, start)
                assert await enveloped.read("LOG", subject, limit, start) == expected, (subject, limit, start)
    for subjects in (">", "log.*", "log.0", "log.none"):
        assert await enveloped.newest("LOG", subjects) == await direct.newest("LOG", subjects)
    for sequence in (1, 2, 61, 119, 120, 121):
        assert await enveloped.holds("LOG", sequence) == await direct.holds("LOG", sequence)
    for attempt in (enveloped.read("NONE", ">", None), enveloped.last("NONE", ">"), enveloped.holds("NONE", 1)):
        with pytest.raises(BusError):
            await attempt


@pytest.mark.nats
async def test_a_value_that_is_replaced_while_a_bucket_is_read_is_not_missed(bus: NatsBus) -> None:
    enveloped, _ = readers(bus)
    keys = {f"k.{number}" for number in range(200)}
    for key in sorted(keys):
        await bus.put("B", key, b"0")

    async def replace() -> None:
        while True:
            for key in sorted(keys):
                await bus.put("B", key, b"1")

    replacing = asyncio.create_task(replace())
    try:
        for _ in range(5):
            found = await enveloped.newest(bucket_stream("B"), bucket_subject("B", ">"))
            assert {message.subject.removeprefix("$KV.B.") for message in found} == keys
            sequences = [message.stream_sequence for message in found]
            assert sequences == sorted(sequences)
    finally:
        replacing.cancel()


class CountingApi:
    """A log of 1000 messages of one subject."""

    def __init__(self) -> None:
        self.num_now = self.num_most = self.num_asked = 0

    async def ask(self, call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self.num_asked += 1
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        await asyncio.sleep(0)
        self.num_now -= 1
        sequence = arguments.get("seq", 1000)
        if sequence > 1000:
            return {"error": {"err_code": NO_MESSAGE}}
        return {"message": {"subject": "log.r", "seq": sequence}}


async def test_readers_wait_for_each_other_where_there_are_many() -> None:
    """The broker throws all calls away when too many wait."""
    api = CountingApi()
    reader = StreamReader(api, is_direct=False)  # type: ignore[arg-type]  # only `ask` is used
    found = await asyncio.gather(*(reader.read("LOG", "log.r", None) for _ in range(50)))
    assert all([message.stream_sequence for message in each] == list(range(1, 1001)) for each in found)
    assert 8 <= api.num_most <= MAX_AT_ONCE
    assert api.num_asked < 50 * 1020


@pytest.mark.nats
async def test_what_is_not_to_be_read_directly_is_read_in_envelopes(bus: NatsBus) -> None:
    """Buckets of earlier versions, until a scheduler changes them: `headrace up` empties one before that."""
    await bus._streams.must("STREAM.CREATE.OLD", {"name": "OLD", "subjects": ["old.*"], "allow_direct": False})
    for number in range(3 * FEW):
        await bus.enqueue(f"old.{number % 2}", b"%d" % number, message_id=str(number))
    _, direct = readers(bus)
    assert [message.data for message in await direct.newest("OLD", "old.*")] == [b"22", b"23"]
    assert [message.data for message in await direct.read("OLD", "old.*", 2)] == [b"0", b"1"]
    last = await direct.last("OLD", "old.1")
    assert last is not None and last.data == b"23"
    assert await direct.last("OLD", "old.2") is None
    assert await direct.holds("OLD", 1) and not await direct.holds("OLD", 99)
