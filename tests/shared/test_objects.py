"""The contract of the object store, on both buses."""

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from headrace_shared import objects, patience
from headrace_shared.bus import Bus, Message
from headrace_shared.errors import BusUnavailable, OutcomeUnknown, QueueFull
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.objects import PIECE_BYTES, ObjectDamaged, ObjectInfo, ObjectStore
from headrace_shared.patience import patiently
from headrace_shared.subjects import objects_spec
from tests.shared.bus_helpers import Pair

MIB = 1024 * 1024
SPEC = objects_spec("TEST", 16 * MIB)


async def opened(bus: Bus) -> ObjectStore:
    store = ObjectStore(bus, SPEC)
    await store.open()
    return store


async def put(store: ObjectStore, name: str, content: bytes, seed: int = 0) -> ObjectInfo:
    """In writes of any sizes."""
    chance, writer, start = random.Random(seed), store.writer(name), 0
    while start < len(content):
        size = chance.randrange(1, 3 * PIECE_BYTES)
        await writer.write(content[start : start + size])
        start += size
    return await writer.finish()


async def joined(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def test_what_is_read_is_what_was_written(pair: Pair) -> None:
    writing, reading = await opened(pair.a), await opened(pair.b)
    for size in (0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * MIB + 17):
        content, name = os.urandom(size), f"object-{size}"
        written = await put(writing, name, content, size)
        info = await reading.info(name)
        assert info == written and info.size == size and info.digest == hashlib.sha256(content).digest()
        pieces = [piece async for piece in reading.pieces(info)]
        assert b"".join(pieces) == content and len(pieces) == -(-size // PIECE_BYTES)


async def test_objects_do_not_mix_and_are_listed(pair: Pair) -> None:
    store = await opened(pair.a)
    contents = {f"object-{n}": os.urandom(n * 100_000) for n in range(5)}
    await asyncio.gather(*(put(store, name, content) for name, content in contents.items()))
    infos = {info.name: info for info in await store.infos(10)}
    assert infos.keys() == contents.keys() and len(await store.infos(2)) == 2
    for name, content in contents.items():
        assert await joined(store.pieces(infos[name])) == content


async def test_a_deleted_object_leaves_nothing(pair: Pair) -> None:
    store = await opened(pair.a)
    await put(store, "keep", b"kept")
    await put(store, "gone", bytes(MIB))
    await store.delete("gone")
    assert await store.info("gone") is None and [info.name for info in await store.infos(10)] == ["keep"]
    await store.delete("gone")
    assert await pair.b.num_messages(SPEC.name) == 2


async def test_what_was_begun_and_not_finished_is_not_there_and_can_be_deleted(pair: Pair) -> None:
    store = await opened(pair.a)
    await store.writer("half").write(bytes(MIB))
    assert await store.info("half") is None and await store.infos(10) == []
    await store.delete("half")
    assert await pair.b.num_messages(SPEC.name) == 0


async def test_a_full_store_refuses_and_keeps_what_it_has(pair: Pair) -> None:
    store = ObjectStore(pair.a, objects_spec("SMALL", MIB))
    await store.open()
    await put(store, "first", bytes(MIB // 2))
    with pytest.raises(QueueFull):
        await store.writer("second").write(bytes(MIB))
    await store.delete("second")
    info = await store.info("first")
    assert info is not None and await joined(store.pieces(info)) == bytes(MIB // 2)


async def test_damage_is_noticed_before_the_end_is_given_out(pair: Pair) -> None:
    store = await opened(pair.a)
    content = os.urandom(4 * PIECE_BYTES)
    info = await put(store, "object", content)
    messages = await pair.a.read(SPEC.name, "$O.TEST.C.object", 10)
    assert await pair.a.delete(SPEC.name, messages[2].stream_sequence)
    got = []
    with pytest.raises(ObjectDamaged):
        async for piece in store.pieces(info):
            got.append(piece)
    assert b"".join(got) == content[: len(b"".join(got))] and len(got) < 3
    wrong = info._replace(digest=bytes(32), num_pieces=2, size=2 * PIECE_BYTES)
    with pytest.raises(ObjectDamaged):
        await joined(store.pieces(wrong))


async def test_the_layout_is_that_of_nats_object_stores(pair: Pair) -> None:
    """ADR-20: what its clients would read, and what they would have written."""
    store = await opened(pair.a)
    await put(store, "file-1", b"hello")
    message = await pair.b.last("OBJ_TEST", "$O.TEST.M." + base64.urlsafe_b64encode(b"file-1").decode())
    assert message is not None
    told = json.loads(message.data)
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"hello").digest()).decode()
    assert told["name"] == "file-1" and told["bucket"] == "TEST" and told["digest"] == f"SHA-256={digest}"
    assert (told["size"], told["chunks"], told["nuid"]) == (5, 1, "file-1")
    pieces = await pair.b.read("OBJ_TEST", "$O.TEST.C." + told["nuid"], 10)
    assert [piece.data for piece in pieces] == [b"hello"]
    theirs = {
        "name": "notes.txt",
        "options": {"max_chunk_size": 131072},
        "bucket": "TEST",
        "nuid": "LkD8VQ2mV0zbGQ8RbVMaaa",
        "size": 5,
        "mtime": "2026-01-01T00:00:00Z",
        "chunks": 1,
        "digest": f"SHA-256={digest}",
    }
    await pair.a.enqueue("$O.TEST.C.LkD8VQ2mV0zbGQ8RbVMaaa", b"hello", message_id="1")
    subject = "$O.TEST.M." + base64.urlsafe_b64encode(b"notes.txt").decode()
    await pair.a.enqueue(subject, json.dumps(theirs).encode(), message_id="2")
    info = await store.info("notes.txt")
    assert info is not None and await joined(store.pieces(info)) == b"hello"
    await store.delete("notes.txt")
    assert await pair.a.read("OBJ_TEST", "$O.TEST.C.LkD8VQ2mV0zbGQ8RbVMaaa", 1) == []


async def test_an_answer_that_is_lost_stores_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy(MemoryBus):
        num_lost = 0

        async def enqueue(self, subject: str, data: bytes, *, message_id: str, headers: object = None) -> int:
            sequence = await super().enqueue(subject, data, message_id=message_id)
            if self.num_lost < 5:
                self.num_lost += 1
                raise OutcomeUnknown("lost")
            return sequence

    monkeypatch.setattr(patience, "RETRY_S", 0.001)
    store = await opened(Lossy(MemoryBroker()))
    content = os.urandom(3 * PIECE_BYTES)
    info = await put(store, "object", content)
    assert info.num_pieces == 3 and await joined(store.pieces(info)) == content


async def test_only_so_much_is_on_its_way_at_once() -> None:
    class Counting(MemoryBus):
        num_now = most = 0

        async def enqueue(self, subject: str, data: bytes, *, message_id: str, headers: object = None) -> int:
            with self.counted():
                await asyncio.sleep(0.001)
                return await super().enqueue(subject, data, message_id=message_id)

        async def read(self, stream: str, subject: str, limit: int, from_sequence: int = 1) -> list[Message]:
            with self.counted():
                await asyncio.sleep(0.001)
                return await super().read(stream, subject, limit, from_sequence)

        @contextlib.contextmanager
        def counted(self) -> Iterator[None]:
            self.num_now += 1
            self.most = max(self.most, self.num_now)
            yield
            self.num_now -= 1

    bus = Counting(MemoryBroker())
    store = await opened(bus)
    infos = await asyncio.gather(*(put(store, f"object-{n}", bytes(MIB), n) for n in range(12)))
    assert bus.most == objects.MAX_AT_ONCE
    contents = await asyncio.gather(*(joined(store.pieces(info)) for info in infos))
    assert bus.most == objects.MAX_AT_ONCE and set(contents) == {bytes(MIB)}


async def test_a_broker_that_stays_away_is_not_waited_for_for_ever() -> None:
    bus = MemoryBus()
    bus.broker.stop()
    with pytest.raises(BusUnavailable):
        await patiently(lambda: bus.num_messages("X"), patience_s=0.2)


# What the store asks of a bus.


async def test_reading_begins_where_one_says(pair: Pair) -> None:
    store = await opened(pair.a)
    await put(store, "a", bytes(3 * PIECE_BYTES))
    await put(store, "b", bytes(PIECE_BYTES))
    messages = await pair.b.read(SPEC.name, "$O.TEST.C.a", 10)
    rest = await pair.b.read(SPEC.name, "$O.TEST.C.a", 10, messages[0].stream_sequence + 1)
    assert rest == messages[1:]
    assert await pair.b.read(SPEC.name, "$O.TEST.C.a", 10, messages[-1].stream_sequence + 1) == []


async def test_purging_a_subject_leaves_the_others(pair: Pair) -> None:
    await opened(pair.a)
    for number in range(6):
        await pair.a.enqueue(f"$O.TEST.C.{number % 2}", b"", message_id=str(number))
    await pair.b.purge(SPEC.name, "$O.TEST.C.1")
    await pair.b.purge(SPEC.name, "$O.TEST.C.none")
    assert await pair.a.num_messages(SPEC.name) == 3
    assert await pair.a.read(SPEC.name, "$O.TEST.C.1", 10) == []
