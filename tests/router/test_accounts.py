"""What a key is charged in the end: by calls of any length, though answers of the broker are lost, or routers stop."""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import Enum, auto
from typing import NamedTuple

import httpx
import pytest

from headrace_router.account import Account
from headrace_router.accounts import Accounts, Charge
from headrace_router.identity import Identity, known
from headrace_router.presence import Presence
from headrace_router.rate_limits import AccountRecord, Amounts
from headrace_shared.api_keys import ApiKey
from headrace_shared.broker import NatsServer
from headrace_shared.bus import Entry
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, BusUnavailable, LimitReached, OutcomeUnknown, RevisionConflict
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import Request
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import ACCOUNTS, bucket_stream, bucket_subject
from tests.router.keys import add_key, until_known
from tests.router.resumable import TEXT, body
from tests.router.support import ScriptedWorker, running_router, until

NOON = 1_800_014_400.0
PATIENCE_S = 10.0


class Loss(Enum):
    NONE = auto()
    BEFORE = auto()
    """The write never reaches the broker."""
    AFTER = auto()
    """Its answer never comes."""
    LATE = auto()
    """It is made after the sender has given up."""


class LossyBus(MemoryBus):
    def __init__(self, broker: MemoryBroker, now: Callable[[], float]) -> None:
        super().__init__(broker)
        self._now = now
        self.losses: deque[Loss] = deque()
        """What happens to the next writes."""
        self.num_failing_reads = 0
        self.num_writes = 0
        self.late: list[asyncio.Task[None]] = []

    async def clock(self, stream: str) -> float:
        return NOON + self._now()

    async def get(self, bucket: str, key: str) -> Entry | None:
        if self.num_failing_reads:
            self.num_failing_reads -= 1
            raise BusUnavailable("lost")
        return await super().get(bucket, key)

    async def update(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        self.num_writes += 1
        current = await super().get(bucket, key)
        if (current.revision if current is not None else 0) != revision:
            raise RevisionConflict("not the revision")
        loss = self.losses.popleft() if self.losses else Loss.NONE
        if loss is Loss.LATE:
            self.late.append(asyncio.create_task(self._update_late(bucket, key, value, revision)))
        if loss in (Loss.NONE, Loss.AFTER):
            made = await super().put(bucket, key, value)
        if loss is not Loss.NONE:
            raise OutcomeUnknown("lost")
        return made

    async def _update_late(self, bucket: str, key: str, value: bytes, revision: int) -> None:
        await asyncio.sleep(random.uniform(0.0, 0.02))
        current = await super().get(bucket, key)
        if (current.revision if current is not None else 0) == revision:
            await super().put(bucket, key, value)


class Part(NamedTuple):
    bus: LossyBus
    accounts: Accounts


class Fleet:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.parts: list[Part] = []
        self.now = 0.0
        self.gone: set[str] = set()

    @property
    def record(self) -> AccountRecord:
        """As the broker has it."""
        stored = self.broker.stream(bucket_stream(ACCOUNTS.name)).read(bucket_subject(ACCOUNTS.name, "k"))
        return decode(stored[-1].data, AccountRecord) if stored else AccountRecord()

    async def until_charged(self, num_tokens: int) -> None:
        await until(lambda: self.record.day_tokens == num_tokens, PATIENCE_S)

    async def until_held(self, **slots: int) -> None:
        await until(
            lambda: self.record.slots == {name.replace("_", "-"): held for name, held in slots.items()}, PATIENCE_S
        )


@contextlib.asynccontextmanager
async def fleet(num_routers: int = 1) -> AsyncIterator[Fleet]:
    made = Fleet()
    for number in range(num_routers):
        bus, name = LossyBus(made.broker, lambda: made.now), f"router-{number}"
        accounts = Accounts(
            bus, name, Presence(name, lambda: 0.0), lambda key: key not in made.gone, now=lambda: made.now
        )
        await accounts.open()
        made.parts.append(Part(bus, accounts))
    running = [asyncio.create_task(part.accounts.run()) for part in made.parts]
    try:
        yield made
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for part in made.parts:
            await asyncio.gather(*part.bus.late)
            await part.bus.close()


def caller(**limits: int) -> Identity:
    return known(ApiKey(key_id="k", secret_hash=b"", name="n", tenant="t", flow=1, created=0, **limits))  # type: ignore[arg-type]  # limits only


def told(accounts: Accounts, identity: Identity) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in accounts.headers(identity)}


@pytest.fixture
def tidies_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.accounts.TIDY_S", 0.01)


DAILY = caller(tokens_per_minute=10_000, tokens_per_day=1_000_000)
"""A twentieth of the smaller limit, 500 tokens, is taken in advance."""


@pytest.mark.usefixtures("tidies_often")
@pytest.mark.parametrize("num_used", [4000, 10])
async def test_a_call_longer_than_a_second_is_charged_for_what_it_used(num_used: int) -> None:
    async with fleet() as routers:
        [part] = routers.parts
        charge = await part.accounts.begin(DAILY, 300)
        assert routers.record.day_tokens == 800
        routers.now += 2.0
        await routers.until_charged(300)
        await asyncio.sleep(0.05)
        charge.settle(num_used)
        charge.close()
        await routers.until_charged(num_used)


@pytest.mark.usefixtures("tidies_often")
async def test_a_long_call_of_a_key_with_no_limit_but_tokens_a_minute_is_charged_in_full() -> None:
    identity = caller(tokens_per_minute=10_000)
    async with fleet() as routers:
        [part] = routers.parts
        charge = await part.accounts.begin(identity, 300)
        routers.now += 2.0
        num_writes = part.bus.num_writes
        await until(lambda: part.bus.num_writes > num_writes, PATIENCE_S)
        await asyncio.sleep(0.05)
        charge.settle(4000)
        charge.close()
        # The estimate was paid for before, and has come back within the two seconds.
        assert told(part.accounts, identity)["remaining-tokens"] == "6300"
        await asyncio.sleep(0.05)
        assert told(part.accounts, identity)["remaining-tokens"] in ("6299", "6300")


@pytest.mark.usefixtures("tidies_often")
@pytest.mark.parametrize("loss", [Loss.BEFORE, Loss.AFTER, Loss.LATE])
@pytest.mark.parametrize("num_failing_reads", [0, 1])
async def test_a_lost_answer_neither_charges_twice_nor_gives_back_twice(loss: Loss, num_failing_reads: int) -> None:
    async with fleet() as routers:
        [part] = routers.parts
        part.bus.losses += [loss, loss]
        part.bus.num_failing_reads = num_failing_reads
        if num_failing_reads:
            with pytest.raises(BusUnavailable):
                await part.accounts.begin(DAILY, 300)
        charge = await part.accounts.begin(DAILY, 300)
        assert routers.record.day_tokens == 800
        part.bus.losses.clear()
        part.bus.losses += [loss, loss]
        part.bus.num_failing_reads = num_failing_reads
        charge.settle(100)
        charge.close()
        routers.now += 2.0
        await routers.until_charged(100)
        await asyncio.sleep(0.1)
        assert routers.record.day_tokens == 100


@pytest.mark.usefixtures("tidies_often")
@pytest.mark.parametrize("loss", [Loss.BEFORE, Loss.AFTER, Loss.LATE])
async def test_a_lost_answer_costs_no_slot(loss: Loss) -> None:
    identity = caller(max_concurrent=3)
    async with fleet() as routers:
        [part] = routers.parts
        for _ in range(3):
            part.bus.losses += [loss]
            charges = [await part.accounts.begin(identity, 0) for _ in range(3)]
            assert routers.record.slots == {"router-0": 3}
            with pytest.raises(LimitReached):
                await part.accounts.begin(identity, 0)
            part.bus.losses += [loss]
            for charge in charges:
                charge.close()
            await routers.until_held()


@pytest.mark.usefixtures("tidies_often")
@pytest.mark.parametrize("held", [0, 1, 5])
async def test_slots_that_the_record_has_wrong_are_put_right(held: int) -> None:
    identity = caller(max_concurrent=10)
    async with fleet() as routers:
        [part] = routers.parts
        charges = [await part.accounts.begin(identity, 0) for _ in range(2)]
        await part.bus.put(ACCOUNTS.name, "k", encode(AccountRecord(slots={"router-0": held, "other": 1})))
        await routers.until_held(other=1, router_0=2)
        for charge in charges:
            charge.close()
        await routers.until_held(other=1)


def test_an_equal_write_of_another_router_is_not_taken_for_our_own() -> None:
    account = Account(ApiKey(key_id="k", secret_hash=b"", name="n", tenant="t", flow=1, created=0), now=0.0)
    ours = AccountRecord(requests_at=NOON, write_id=1)
    account.begin(ours, Amounts(1)).is_doubtful = True
    account.see(AccountRecord(requests_at=NOON, write_id=2), 7)
    assert account.spare == Amounts() and account.write is not None
    account.see(ours, 6)
    assert account.spare == Amounts(1) and account.write is None


def test_what_may_have_been_given_back_is_not_used_and_a_debt_that_may_have_been_charged_is_still_owed() -> None:
    account = Account(ApiKey(key_id="k", secret_hash=b"", name="n", tenant="t", flow=1, created=0), now=0.0)
    account.spare = Amounts(5, -300)
    for is_doubtful, spare in ((False, Amounts(5, -300)), (True, Amounts(0, -300))):
        account.begin(AccountRecord(write_id=1), Amounts(-5, 300)).is_doubtful = is_doubtful
        assert account.spare == Amounts(0, -300)
        account.not_made()
        assert account.spare == spare


@pytest.mark.usefixtures("tidies_often")
@pytest.mark.parametrize(("num_routers", "seed"), [(1, 1), (1, 2), (3, 3), (3, 4)])
async def test_whatever_is_lost_no_limit_is_exceeded_and_nothing_is_free(num_routers: int, seed: int) -> None:
    """One router alone knows of each write in the end whether it was made: then the account is exact."""
    draw = random.Random(seed)
    identity = caller(tokens_per_day=1_000_000, max_concurrent=40)
    num_used = num_running = most = 0

    async def call(part: Part) -> None:
        nonlocal num_used, num_running, most
        await asyncio.sleep(draw.uniform(0.0, 1.0))
        beginning = asyncio.create_task(part.accounts.begin(identity, draw.randrange(1, 3000)))
        if draw.random() < 0.1:
            asyncio.get_running_loop().call_later(draw.uniform(0.0, 0.01), beginning.cancel)
        [charge] = await asyncio.gather(beginning, return_exceptions=True)
        if not isinstance(charge, Charge):
            assert isinstance(charge, BusError | LimitReached | asyncio.CancelledError), charge
            return
        num_running += 1
        most = max(most, num_running)
        await asyncio.sleep(draw.uniform(0.0, 0.3))
        used = draw.randrange(1, 6000)
        charge.settle(used)
        num_running, num_used = num_running - 1, num_used + used
        charge.close()

    async def trouble(routers: Fleet) -> None:
        while True:
            for part in routers.parts:
                part.bus.losses = deque(draw.choices(list(Loss), weights=(3, 1, 1, 1), k=10))
                part.bus.num_failing_reads = draw.choice((0, 0, 1))
            routers.now += draw.uniform(0.0, 0.7)
            await asyncio.sleep(0.02)

    async with fleet(num_routers) as routers:
        troubling = asyncio.create_task(trouble(routers))
        async with asyncio.timeout(4 * PATIENCE_S):
            await asyncio.gather(*(call(draw.choice(routers.parts)) for _ in range(200)))
        troubling.cancel()
        await asyncio.gather(troubling, return_exceptions=True)
        for part in routers.parts:
            part.bus.losses.clear()
            part.bus.num_failing_reads = 0
        routers.now += 5.0
        await routers.until_held()
        if num_routers == 1:
            await routers.until_charged(num_used)
        await asyncio.sleep(0.2)
        charged = routers.record.day_tokens
    assert num_used and most <= 40
    assert charged == num_used if num_routers == 1 else charged >= num_used


async def test_a_background_call_that_outlives_its_router_is_not_refunded() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        await asyncio.sleep(60.0)

    broker = MemoryBroker()
    async with running_router(script, buses=(MemoryBus(broker), MemoryBus(broker))) as router:
        headers = await add_key(router.bus, tokens_per_day=100_000)
        await until_known(router, headers)
        asked = body(TEXT, stream=False, background=True, max_tokens=200)
        with pytest.raises(httpx.ReadTimeout):
            await router.client.post(TEXT, json=asked, headers=headers, timeout=0.5)
    bus = MemoryBus(broker)
    [entry] = await bus.entries(ACCOUNTS.name)
    assert 200 <= decode(entry.value, AccountRecord).day_tokens < 300, "what lies unused was given back, and no more"
    await bus.close()


@pytest.mark.usefixtures("tidies_often")
async def test_the_record_of_a_key_that_is_gone_is_forgotten() -> None:
    identity = caller(tokens_per_minute=60_000)
    async with fleet(2) as routers:
        here, there = routers.parts
        charge = await there.accounts.begin(identity, 1000)
        charge.settle(300_000)
        charge.close()

        async def until_told(remaining: str) -> None:
            await until(lambda: told(here.accounts, identity)["remaining-tokens"] == remaining, PATIENCE_S)

        await until_told("0")
        routers.now += 31.0
        await asyncio.sleep(0.1)
        await until_told("0")
        routers.gone.add("k")
        routers.now += 31.0
        await until_told("60000")


@pytest.mark.nats
@pytest.mark.usefixtures("tidies_often")
async def test_what_a_hung_broker_was_sent_and_does_after_all_counts_once(nats_server: NatsServer) -> None:
    url = nats_server.url
    hasty = await NatsBus.connect(
        url, name="hasty", on_closed=lambda: None, request_timeout_s=1.0, ping_interval_s=30.0
    )
    patient = await NatsBus.connect(url, name="patient", on_closed=lambda: None, ping_interval_s=30.0)
    identity = caller(tokens_per_day=1_000_000, max_concurrent=3)
    now = 0.0
    accounts = Accounts(hasty, "router-0", Presence("router-0", lambda: 0.0), lambda key: True, now=lambda: now)
    await accounts.open()
    latest = AccountRecord()

    def on_change(entry: Entry | None, key: str) -> None:
        nonlocal latest
        latest = AccountRecord() if entry is None else decode(entry.value, AccountRecord)

    await patient.watch(ACCOUNTS.name, on_change)
    running = asyncio.create_task(accounts.run())
    loop = asyncio.get_running_loop()
    try:
        nats_server.pause()
        loop.call_later(1.5, nats_server.resume)
        charge: Charge | None = None
        while charge is None:
            with contextlib.suppress(BusError):
                charge = await accounts.begin(identity, 300)
        await until(lambda: latest.slots == {"router-0": 1}, PATIENCE_S)
        charge.settle(100)
        nats_server.pause()
        loop.call_later(1.5, nats_server.resume)
        charge.close()
        now += 2.0
        await until(lambda: latest.day_tokens == 100 and not latest.slots, PATIENCE_S)
        await asyncio.sleep(0.2)
        assert latest.day_tokens == 100
    finally:
        nats_server.resume()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await hasty.close()
        await patient.close()
