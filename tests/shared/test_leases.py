"""Leases: the pure table, and the holder against the in-process broker and the real one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.bus import Entry
from headrace_shared.codec import encode
from headrace_shared.errors import OutcomeUnknown, ProtocolError, RevisionConflict
from headrace_shared.leases import LEASE_TTL_S, RENEW_S, LeaseRecord, Leases, LeaseTable
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import LEASES
from headrace_shared.tasks import end
from tests.shared.bus_helpers import until

KEY = "worker.w1"


def entry(holder: str, epoch: int, revision: int) -> Entry:
    return Entry(KEY, encode(LeaseRecord(holder=holder, epoch=epoch)), revision)


# The table.


def test_an_unknown_key_is_free() -> None:
    assert LeaseTable().is_free(KEY, 0.0)


def test_a_lease_is_taken_until_it_shows_no_new_revision_for_its_time() -> None:
    table = LeaseTable()
    table.observe(KEY, entry("a", 1, 7), 100.0)
    assert not table.is_free(KEY, 100.0 + LEASE_TTL_S - 0.01)
    assert table.is_free(KEY, 100.0 + LEASE_TTL_S)
    table.observe(KEY, entry("a", 1, 8), 102.0)
    assert not table.is_free(KEY, 102.0 + LEASE_TTL_S - 0.01)


def test_repeating_an_old_revision_prolongs_nothing() -> None:
    table = LeaseTable()
    table.observe(KEY, entry("a", 1, 7), 100.0)
    table.observe(KEY, entry("a", 1, 7), 102.0)
    table.observe(KEY, entry("z", 0, 6), 102.0)
    assert table.is_free(KEY, 100.0 + LEASE_TTL_S)
    known = table.get(KEY)
    assert known is not None and (known.record.holder, known.revision, known.changed_at) == ("a", 7, 100.0)


def test_a_released_lease_is_free_at_once_and_keeps_its_epoch() -> None:
    table = LeaseTable()
    table.observe(KEY, entry("a", 4, 7), 100.0)
    table.observe(KEY, entry("", 4, 8), 100.1)
    assert table.is_free(KEY, 100.1)
    known = table.get(KEY)
    assert known is not None and known.record.epoch == 4


def test_a_removed_key_is_free_and_forgotten() -> None:
    table = LeaseTable()
    table.observe(KEY, entry("a", 4, 7), 100.0)
    table.observe(KEY, None, 100.0)
    assert table.is_free(KEY, 100.0) and table.keys() == []


def test_what_is_no_lease_is_no_sign_of_life_and_can_be_replaced() -> None:
    table = LeaseTable()
    table.observe(KEY, entry("a", 4, 7), 100.0)
    with pytest.raises(ProtocolError):
        table.observe(KEY, Entry(KEY, b"\xc1", 8), 100.1)
    assert not table.is_free(KEY, 100.2)
    assert table.is_free(KEY, 100.0 + LEASE_TTL_S)
    known = table.get(KEY)
    assert known is not None and (known.record.epoch, known.revision) == (4, 8)


def test_a_key_that_never_held_a_lease_is_free() -> None:
    table = LeaseTable()
    with pytest.raises(ProtocolError):
        table.observe(KEY, Entry(KEY, b"{}", 8), 100.0)
    known = table.get(KEY)
    assert table.is_free(KEY, 100.0) and known is not None and (known.record.epoch, known.revision) == (0, 8)


# The holder, with clocks of its own.


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Trio:
    """Three contenders, each with a connection and a clock."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.clocks = [Clock(), Clock(), Clock()]
        self.clocks[1].now = 5.0
        self.buses = [MemoryBus(self.broker) for _ in self.clocks]
        self.leases = [
            Leases(bus, LEASES.name, name, clock)
            for bus, name, clock in zip(self.buses, "abc", self.clocks, strict=True)
        ]

    def pass_time(self, seconds: float) -> None:
        for clock in self.clocks:
            clock.now += seconds


@pytest.fixture
async def trio() -> Trio:
    trio = Trio()
    await trio.buses[0].ensure_bucket(LEASES)
    for leases in trio.leases:
        await leases.open()
    return trio


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_of_many_contenders_one_gets_the_lease(trio: Trio) -> None:
    results = await asyncio.gather(*(leases.acquire(KEY) for leases in trio.leases))
    won = [lease for lease in results if lease is not None]
    assert len(won) == 1 and won[0].epoch == 1
    await settle()
    assert [leases.is_free(KEY) for leases in trio.leases] == [False] * 3


async def test_each_change_of_holder_raises_the_epoch(trio: Trio) -> None:
    a, b, c = trio.leases
    first = await a.acquire(KEY)
    await settle()
    assert first is not None and await b.acquire(KEY) is None
    trio.pass_time(LEASE_TTL_S)
    second = await b.acquire(KEY)
    assert second is not None and second.epoch == 2
    await b.release(KEY)
    await settle()
    third = await c.acquire(KEY)
    assert third is not None and third.epoch == 3
    again = trio.leases[0].observed(KEY)
    await settle()
    assert again is not None and trio.leases[0].held == {}


async def test_renewals_keep_a_lease_and_its_epoch(trio: Trio) -> None:
    a, b, _ = trio.leases
    assert await a.acquire(KEY) is not None
    for _ in range(10):
        trio.pass_time(LEASE_TTL_S - 0.5)
        assert (await a.renew(KEY)).epoch == 1
        await settle()
        assert await b.acquire(KEY) is None
    assert list(a.held) == [KEY]


async def test_a_renewal_after_another_took_over_reports_the_loss(trio: Trio) -> None:
    a, b, _ = trio.leases
    assert await a.acquire(KEY) is not None
    await settle()
    trio.clocks[1].now += LEASE_TTL_S  # b's clock runs ahead
    assert await b.acquire(KEY) is not None
    with pytest.raises(RevisionConflict):
        await a.renew(KEY)
    assert a.held == {}
    with pytest.raises(RevisionConflict):
        await a.renew(KEY)
    assert list(b.held) == [KEY]


async def test_an_unconfirmed_lease_is_not_held_when_its_time_is_up(trio: Trio) -> None:
    a, *_ = trio.leases
    assert await a.acquire(KEY) is not None
    trio.pass_time(LEASE_TTL_S - 0.01)
    assert list(a.held) == [KEY]
    trio.pass_time(0.01)
    assert a.held == {}
    with pytest.raises(RevisionConflict):
        await a.renew(KEY)


async def test_a_renewal_whose_answer_was_lost_is_recognised(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = trio.leases
    assert await a.acquire(KEY) is not None
    update = trio.buses[0].update

    async def store_but_do_not_answer(bucket: str, key: str, value: bytes, revision: int) -> int:
        await update(bucket, key, value, revision)
        raise OutcomeUnknown("lost")

    monkeypatch.setattr(trio.buses[0], "update", store_but_do_not_answer)
    with pytest.raises(OutcomeUnknown):
        await a.renew(KEY)
    monkeypatch.undo()
    assert (await a.renew(KEY)).epoch == 1
    assert list(a.held) == [KEY] and await b.acquire(KEY) is None


async def test_a_lost_lease_is_not_released_by_its_former_holder(trio: Trio) -> None:
    a, b, _ = trio.leases
    assert await a.acquire(KEY) is not None
    await settle()
    trio.clocks[1].now += LEASE_TTL_S
    assert await b.acquire(KEY) is not None
    await a.release(KEY)
    await settle()
    assert not trio.leases[2].is_free(KEY)
    assert (await b.renew(KEY)).epoch == 2


async def test_the_key_of_something_gone_can_be_forgotten_once_free(trio: Trio) -> None:
    a, b, _ = trio.leases
    assert await a.acquire(KEY) is not None
    await settle()
    await b.forget(KEY)
    assert await trio.buses[0].get(LEASES.name, KEY) is not None
    trio.pass_time(LEASE_TTL_S)
    await b.forget(KEY)
    assert await trio.buses[0].get(LEASES.name, KEY) is None


async def test_a_foreign_value_is_no_lease_and_does_not_bar_one(trio: Trio) -> None:
    a, b, _ = trio.leases
    await trio.buses[1].put(LEASES.name, KEY, b"\xc1")
    await settle()
    first = await a.acquire(KEY)
    assert first is not None
    await settle()
    await trio.buses[2].put(LEASES.name, KEY, b"\xc1")
    await settle()
    with pytest.raises(RevisionConflict):
        await a.renew(KEY)
    assert await b.acquire(KEY) is None, "its holder may not know yet"
    trio.pass_time(LEASE_TTL_S)
    second = await b.acquire(KEY)
    assert second is not None and second.epoch == first.epoch + 1


# Kept by a task, in real time.


def run_keeper(leases: Leases, lost: list[str]) -> "asyncio.Task[None]":
    return asyncio.create_task(leases.keep(lost.append))


async def test_a_kept_lease_outlives_its_time_and_a_released_one_is_not_reported(trio: Trio) -> None:
    leases = Leases(trio.buses[0], LEASES.name, "kept")
    lost: list[str] = []
    keeper = run_keeper(leases, lost)
    assert await leases.acquire(KEY) is not None and await leases.acquire("worker.w2") is not None
    await asyncio.sleep(LEASE_TTL_S + 0.5)
    assert sorted(leases.held) == [KEY, "worker.w2"]
    await leases.release("worker.w2")
    await asyncio.sleep(RENEW_S + 0.3)
    assert list(leases.held) == [KEY] and lost == []
    await end(keeper)


async def test_a_holder_cut_off_from_the_broker_gives_up_before_others_may_take_it(trio: Trio) -> None:
    leases = Leases(trio.buses[0], LEASES.name, "cut off")
    other = Leases(trio.buses[1], LEASES.name, "other")
    await other.open()
    lost: list[str] = []
    keeper = run_keeper(leases, lost)
    assert await leases.acquire(KEY) is not None
    await asyncio.sleep(0)
    trio.broker.stop()
    seconds = await until(lambda: lost, LEASE_TTL_S + 1.0)
    assert seconds > LEASE_TTL_S - RENEW_S - 0.5
    assert lost == [KEY] and leases.held == {}
    await end(keeper)


@pytest.fixture
async def buses(nats_server: NatsServer) -> AsyncIterator[list[NatsBus]]:
    buses = [await NatsBus.connect(nats_server.url, name=name, on_closed=lambda: None) for name in "ab"]
    await buses[0].ensure_bucket(LEASES)
    yield buses
    nats_server.resume()
    for bus in buses:
        await bus.close()


@pytest.mark.nats
async def test_a_hung_broker_costs_the_lease_and_a_peer_takes_it_afterwards(
    buses: list[NatsBus], nats_server: NatsServer
) -> None:
    holder, peer = (Leases(bus, LEASES.name, name) for bus, name in zip(buses, "ab", strict=True))
    await holder.open()
    await peer.open()
    lost: list[str] = []
    keeper = run_keeper(holder, lost)
    assert await holder.acquire(KEY) is not None
    await asyncio.sleep(1.5 * RENEW_S)
    assert await peer.acquire(KEY) is None
    nats_server.pause()
    seconds = await until(lambda: lost)
    assert LEASE_TTL_S - RENEW_S - 0.5 < seconds < LEASE_TTL_S + 5.0 and holder.held == {}
    nats_server.resume()
    await until(lambda: buses[1].is_connected)
    await until(lambda: peer.is_free(KEY))
    taken = None
    async with asyncio.timeout(30.0):
        while taken is None:
            taken = await peer.acquire(KEY)
            await asyncio.sleep(0.1)
    assert taken.epoch == 2
    observed = peer.observed(KEY)
    assert observed is not None and observed.record.holder == "b"
    await end(keeper)
    await holder.close()
    await peer.close()


@pytest.mark.nats
async def test_a_quick_restart_of_the_broker_costs_no_lease(buses: list[NatsBus], nats_server: NatsServer) -> None:
    holder, peer = (Leases(bus, LEASES.name, name) for bus, name in zip(buses, "ab", strict=True))
    await peer.open()
    lost: list[str] = []
    keeper = run_keeper(holder, lost)
    assert await holder.acquire(KEY) is not None
    await nats_server.kill()
    await asyncio.sleep(0.5)
    await nats_server.start()
    await asyncio.sleep(LEASE_TTL_S + 0.5)
    assert lost == [] and list(holder.held) == [KEY]
    assert await peer.acquire(KEY) is None
    await end(keeper)
    await peer.close()
