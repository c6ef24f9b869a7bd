"""The contract's second half: token logs and buckets, again on both buses."""

import asyncio
import time

import pytest

from headrace_shared.bus import Entry
from headrace_shared.errors import BusUnavailable, RevisionConflict
from headrace_shared.subjects import StreamSpec
from tests.shared.bus_helpers import BUCKET, CONSUMER, Pair, until

LOG = StreamSpec("LOG", ("log.*.*",), in_memory=True, max_messages=1000, max_age_s=60.0)


# Logs.


async def test_published_messages_are_kept_by_their_stream(pair: Pair) -> None:
    await pair.a.ensure_stream(LOG)
    for number in range(700):
        pair.a.publish(f"log.r.{number % 2}", str(number).encode(), {"n": str(number)})
    async with asyncio.timeout(30.0):
        while await pair.b.num_messages("LOG") < 700:  # noqa: ASYNC110 - the broker's state
            await asyncio.sleep(0.01)
    await pair.a.enqueue("log.r.end", b"", message_id="end")
    assert await pair.b.num_messages("LOG") == 701
    messages = await pair.b.read("LOG", "log.r.1", 1000)
    assert [m.data for m in messages] == [str(n).encode() for n in range(1, 700, 2)]
    assert messages[0].headers == {"n": "1"} and messages[0].subject == "log.r.1"
    sequences = [m.stream_sequence for m in messages]
    assert sequences == sorted(set(sequences)) and sequences[0] > 0
    assert [m.data for m in await pair.b.read("LOG", "log.r.1", 3)] == [b"1", b"3", b"5"]
    last = await pair.b.last("LOG", "log.r.1")
    assert last is not None and (last.data, last.stream_sequence) == (b"699", sequences[-1])
    assert await pair.b.read("LOG", "log.r.none", 10) == [] and await pair.b.last("LOG", "log.r.none") is None


async def test_a_log_drops_its_oldest_messages(pair: Pair) -> None:
    await pair.a.ensure_stream(LOG._replace(max_messages=3, max_per_subject=2))
    for number in range(5):
        await pair.a.enqueue("log.r.a", str(number).encode(), message_id=str(number))
    assert [m.data for m in await pair.a.read("LOG", "log.r.a", 10)] == [b"3", b"4"]
    for number in range(2):
        await pair.a.enqueue(f"log.r.b{number}", b"", message_id=f"b{number}")
    assert [m.data for m in await pair.a.read("LOG", "log.r.a", 10)] == [b"4"]


async def test_a_stream_tells_what_it_holds_and_the_time(pair: Pair) -> None:
    await pair.a.ensure_stream(LOG)
    sequence = await pair.a.enqueue("log.r.a", b"x", message_id="1")
    assert await pair.b.holds("LOG", sequence) and not await pair.b.holds("LOG", sequence + 1)
    assert await pair.b.delete("LOG", sequence)
    assert not await pair.b.holds("LOG", sequence)
    first = await pair.b.clock("LOG")
    await asyncio.sleep(0.05)
    assert await pair.b.clock("LOG") - first > 0.0
    assert abs(first - time.time()) < 5.0


async def test_what_names_no_stream_is_refused(pair: Pair) -> None:
    for operation in (
        pair.a.enqueue("nowhere.at.all", b"", message_id="1"),
        pair.a.pull(CONSUMER, 0.2),
        pair.a.read("NONE", "x", 1),
        pair.a.num_messages("NONE"),
        pair.a.made_at("NONE"),
        pair.a.holds("NONE", 1),
        pair.a.clock("NONE"),
        pair.a.get("NONE", "k"),
        pair.a.put("NONE", "k", b""),
    ):
        with pytest.raises(BusUnavailable):
            await operation


# Buckets.


async def test_a_key_is_created_once_and_changed_only_with_its_revision(pair: Pair) -> None:
    await pair.a.ensure_bucket(BUCKET)
    await pair.b.ensure_bucket(BUCKET)
    assert await pair.a.get("B", "k.1") is None
    first = await pair.a.create("B", "k.1", b"one")
    with pytest.raises(RevisionConflict):
        await pair.b.create("B", "k.1", b"two")
    assert await pair.b.get("B", "k.1") == Entry("k.1", b"one", first)
    second = await pair.b.update("B", "k.1", b"two", first)
    assert second > first
    with pytest.raises(RevisionConflict):
        await pair.a.update("B", "k.1", b"three", first)
    with pytest.raises(RevisionConflict):
        await pair.a.remove("B", "k.1", first)
    third = await pair.a.put("B", "k.1", b"three")
    assert third > second and await pair.b.get("B", "k.1") == Entry("k.1", b"three", third)


async def test_one_of_many_concurrent_updates_wins(pair: Pair) -> None:
    await pair.a.ensure_bucket(BUCKET)
    revision = await pair.a.create("B", "k", b"")
    results = await asyncio.gather(
        *(bus.update("B", "k", str(n).encode(), revision) for n in range(10) for bus in pair), return_exceptions=True
    )
    won = [r for r in results if isinstance(r, int)]
    assert len(won) == 1 and sum(isinstance(r, RevisionConflict) for r in results) == 19


async def test_a_removed_key_is_gone_and_can_be_created_again(pair: Pair) -> None:
    await pair.a.ensure_bucket(BUCKET)
    await pair.a.remove("B", "k")
    revision = await pair.a.create("B", "k", b"1")
    await pair.b.remove("B", "k", revision)
    assert await pair.a.get("B", "k") is None and await pair.a.entries("B") == []
    assert await pair.a.create("B", "k", b"2") > revision


async def test_entries_lists_each_key_with_its_newest_value(pair: Pair) -> None:
    await pair.a.ensure_bucket(BUCKET)
    for number in range(300):
        await pair.a.put("B", f"k.{number}", b"old")
    for number in range(150):
        await pair.a.put("B", f"k.{number}", b"new")
    entries = {entry.key: entry.value for entry in await pair.b.entries("B")}
    assert entries == {f"k.{n}": b"new" if n < 150 else b"old" for n in range(300)}


async def test_entries_can_be_had_of_a_part_of_the_keys(pair: Pair) -> None:
    await pair.a.ensure_bucket(BUCKET)
    for key in ("a.1", "a.2", "ab.1", "b.1", "a"):
        await pair.a.put("B", key, key.encode())
    await pair.a.remove("B", "a.2")
    assert [entry.key for entry in await pair.b.entries("B", "a")] == ["a.1"]
    assert await pair.b.entries("B", "c") == []


async def test_a_watch_tells_every_key_and_each_change(pair: Pair) -> None:
    await pair.a.ensure_bucket(BUCKET)
    first = await pair.a.put("B", "k.1", b"1")
    got: list[tuple[Entry | None, str]] = []
    watch = await pair.b.watch("B", lambda entry, key: got.append((entry, key)))
    assert got == [(Entry("k.1", b"1", first), "k.1")]
    second = await pair.a.put("B", "k.2", b"2")
    with pytest.raises(RevisionConflict):
        await pair.a.update("B", "k.2", b"lost the race", first)
    await pair.a.remove("B", "k.1")
    await until(lambda: len(got) == 3)
    assert got[1:] == [(Entry("k.2", b"2", second), "k.2"), (None, "k.1")]
    await watch.close()
    await pair.a.put("B", "k.3", b"3")
    await asyncio.sleep(0.1)
    assert len(got) == 3


async def test_a_watch_of_an_empty_bucket_is_ready_at_once(pair: Pair) -> None:
    await pair.a.ensure_bucket(BUCKET)
    started = time.monotonic()
    await pair.a.watch("B", lambda entry, key: None)
    assert time.monotonic() - started < 10.0


async def test_keys_of_a_bucket_expire(pair: Pair) -> None:
    await pair.a.ensure_bucket(BUCKET._replace(ttl_s=1.0))
    got: list[tuple[Entry | None, str]] = []
    await pair.b.watch("B", lambda entry, key: got.append((entry, key)))
    await pair.a.put("B", "k", b"1")
    assert await pair.a.get("B", "k") is not None
    await until(lambda: (None, "k") in got)
    assert await pair.a.get("B", "k") is None and await pair.a.entries("B") == []
    await pair.a.create("B", "k", b"2")
