"""Nobody fills the store of responses alone, at whichever router and for however long each of them lives."""

import asyncio

import pytest

from headrace_router.responses_api import share_book, shares, store
from headrace_router.responses_api.share_book import ShareBook
from headrace_router.responses_api.shares import ShareRecord, Shares
from headrace_shared.errors import BusUnavailable
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.subjects import RESPONSE_SHARES, RESPONSES
from tests.router.responses_api.client import PATH, create
from tests.router.resumable import two_routers
from tests.router.support import says, until

HOUR_S = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000 * HOUR_S

    def __call__(self) -> float:
        return self.now


def test_each_owner_has_a_share_of_its_own() -> None:
    each = Shares(100, Clock())
    each.fill("a", 60)
    each.fill("a", 40)
    assert not each.has_room("a", 1) and each.has_room("a", 0) and each.has_room("b", 100)


def test_what_is_deleted_makes_room_as_long_as_it_would_have_counted() -> None:
    clock = Clock()
    each = Shares(100, clock)
    stored_at = clock.now
    each.fill("a", 60)
    clock.now += 2 * HOUR_S
    each.fill("a", 40)
    each.free("a", 50, stored_at)
    assert each.has_room("a", 50) and not each.has_room("a", 51)
    clock.now += 23 * HOUR_S
    assert each.has_room("a", 60) and not each.has_room("a", 61), "the deletion goes with what was deleted"


def test_more_than_there_is_cannot_be_deleted() -> None:
    clock = Clock()
    each = Shares(100, clock)
    each.fill("a", 60)
    each.free("a", 1000, clock.now)
    each.free("b", 5, clock.now)
    assert each.has_room("a", 100) and not each.has_room("a", 101) and not each.has_room("b", 101)
    clock.now += HOUR_S
    each.fill("a", 100)
    assert not each.has_room("a", 1)


def test_what_is_older_than_a_day_does_not_count() -> None:
    clock = Clock()
    each = Shares(100, clock)
    each.fill("a", 100)
    clock.now += 23 * HOUR_S
    assert not each.has_room("a", 1)
    clock.now += 2 * HOUR_S
    assert each.has_room("a", 100)
    each.fill("a", 30)
    assert each.has_room("a", 70) and not each.has_room("a", 71)


def test_what_others_count_adds_up() -> None:
    clock = Clock()
    each = Shares(100, clock)
    hour = int(clock.now // HOUR_S)
    each.fill("a", 30)
    each.tell("a", "other", ShareRecord(filled={hour: 30, hour - 30: 1000}))
    each.tell("a", "third", ShareRecord(filled={hour - 1: 30}))
    assert each.has_room("a", 10) and not each.has_room("a", 11)
    each.tell("a", "other", ShareRecord(filled={hour: 50}))
    assert not each.has_room("a", 1), "the latest word of each counts"
    each.tell("a", "third", ShareRecord(filled={hour - 1: 30, hour: -80}))
    assert each.has_room("a", 70) and not each.has_room("a", 71), "somebody else may delete what one has stored"
    for writer in ("third", "other", "other", "nobody"):
        each.tell("a", writer, None)
    assert each.has_room("a", 70) and not each.has_room("a", 71)


def test_owners_are_bounded() -> None:
    shares_of = Shares(100, Clock())
    for number in range(shares.MAX_OWNERS + 1):
        shares_of.fill(str(number), 100)
    assert shares_of.has_room("0", 1) and not shares_of.has_room("1", 1)


def test_what_others_tell_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_TOLD", 2)
    clock = Clock()
    each = Shares(100, clock)
    full = ShareRecord(filled={int(clock.now // HOUR_S): 100})
    for owner in ("a", "b", "c"):
        each.tell(owner, "x", full)
    assert [each.has_room(owner, 1) for owner in ("a", "b", "c")] == [False, False, True]
    each.tell("a", "x", None)
    each.tell("c", "x", full)
    assert [each.has_room(owner, 1) for owner in ("a", "b", "c")] == [True, False, False]


async def test_routers_count_together_and_a_new_one_knows_what_was_stored_before_it() -> None:
    broker = MemoryBroker()
    first, second, later = (ShareBook(MemoryBus(broker), 100) for _ in range(3))
    await first.open()
    await second.open()
    running = [asyncio.create_task(each.run()) for each in (first, second)]
    first.fill("a", 40)
    second.fill("a", 40)
    await until(lambda: not first.has_room("a", 21) and not second.has_room("a", 21))
    assert first.has_room("a", 20) and second.has_room("b", 100)
    first.fill("a", 20)
    await first.close()  # tells the last of it
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await later.open()
    assert not later.has_room("a", 1)


async def test_what_could_not_be_told_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(MemoryBus):
        is_away = True

        async def put(self, bucket: str, key: str, value: bytes) -> int:
            if self.is_away:
                raise BusUnavailable
            return await super().put(bucket, key, value)

    monkeypatch.setattr(share_book, "RETRY_S", 0.01)
    bus = Away(MemoryBroker())
    book = ShareBook(bus, 100)
    await book.open()
    running = asyncio.create_task(book.run())
    book.fill("a", 40)
    await asyncio.sleep(0.05)
    await book.close()
    assert await bus.entries(RESPONSE_SHARES.name) == [] and not running.done()
    bus.is_away = False
    for _ in range(6000):
        if await bus.entries(RESPONSE_SHARES.name):
            break
        await asyncio.sleep(0.01)
    assert await bus.entries(RESPONSE_SHARES.name)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_who_is_at_the_limit_is_so_at_every_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "OWNERS", RESPONSES.max_bytes // 2000)
    async with two_routers(says("ok")) as routers:
        made = []
        while (latest := await create(routers.a.client))["store"]:
            made.append(latest["id"])
        assert made
        for _ in range(20):
            if not (await create(routers.b.client))["store"]:
                break
            await asyncio.sleep(0.3)
        assert not (await create(routers.b.client))["store"]
        gone = await asyncio.gather(*(routers.b.client.delete(f"{PATH}/{made[0]}") for _ in range(8)))
        assert {reply.status_code for reply in gone} <= {200, 404}
        again = 0
        while (await create(routers.b.client))["store"]:
            again += 1
        assert again <= 2, "a response makes room once, however often it is deleted"
