"""What a key may still use, by the numbers."""

import random

import pytest

from headrace_router.account import Account
from headrace_router.rate_limits import (
    DAY_S,
    AccountRecord,
    Amounts,
    Refusal,
    Taken,
    charge,
    duration,
    limited,
    remaining,
    reset_s,
    share,
    take,
    too_much,
)
from headrace_shared.api_keys import ApiKey

NOW = 1_800_000_000.0
NOTHING = Amounts()


def key(**limits: int) -> ApiKey:
    return ApiKey(key_id="0" * 12, secret_hash=b"", name="n", tenant="t", flow=1, created=0, **limits)  # type: ignore[arg-type]  # limits only


def take_one(record: AccountRecord, of: ApiKey, now: float, need: Amounts, *, dead: str = "") -> Taken | Refusal:
    return take(record, of, need, NOTHING, router="r1", is_alive=lambda name: name != dead, now=now)


def test_a_minutes_requests_at_once_and_then_one_at_a_time() -> None:
    of, record = key(requests_per_minute=6), AccountRecord()
    for _ in range(6):
        taken = take_one(record, of, NOW, Amounts(1))
        assert isinstance(taken, Taken)
        record = taken.record
    refused = take_one(record, of, NOW, Amounts(1))
    assert isinstance(refused, Refusal) and refused.limit == "requests"
    assert refused.retry_after_s == pytest.approx(10.0)
    assert isinstance(take_one(record, of, NOW + 9.9, Amounts(1)), Refusal)
    assert isinstance(take_one(record, of, NOW + 10.0, Amounts(1)), Taken)


def test_a_clock_that_is_set_back_does_not_lock_anybody_out() -> None:
    of = key(requests_per_minute=6)
    taken = take_one(AccountRecord(), of, NOW, Amounts(6))
    assert isinstance(taken, Taken)
    again = take_one(taken.record, of, NOW - 3600.0, Amounts(6))
    assert isinstance(again, Taken)
    assert isinstance(take_one(again.record, of, NOW - 3600.0, Amounts(1)), Refusal)
    assert isinstance(take_one(taken.record, of, NOW - 1.0, Amounts(1)), Refusal), "clocks may differ a little"


def test_no_span_of_time_sees_more_than_the_limit_gives() -> None:
    draw = random.Random(1)
    of, record, now = key(requests_per_minute=30), AccountRecord(), NOW
    taken_at: list[float] = []
    for _ in range(2000):
        now += draw.expovariate(1.5)
        taken = take_one(record, of, now, Amounts(1))
        if isinstance(taken, Taken):
            record = taken.record
            taken_at.append(now)
    for start in range(0, len(taken_at), 7):
        for end in range(start, len(taken_at), 11):
            span = taken_at[end] - taken_at[start]
            assert end - start + 1 <= 30 * (1 + span / 60.0) + 1e-6
    assert len(taken_at) >= 0.95 * 30 * (now - NOW) / 60.0


def test_tokens_come_back_when_they_were_not_used() -> None:
    of = key(tokens_per_minute=1000)
    taken = take_one(AccountRecord(), of, NOW, Amounts(tokens=900))
    assert isinstance(taken, Taken)
    assert isinstance(take_one(taken.record, of, NOW, Amounts(tokens=200)), Refusal)
    record = charge(taken.record, of, Amounts(tokens=-850), "r1", NOW)
    assert isinstance(take_one(record, of, NOW, Amounts(tokens=950)), Taken)


def test_what_exceeds_a_limit_by_itself_is_refused_for_good() -> None:
    of = key(tokens_per_minute=1000, tokens_per_day=500, requests_per_minute=10, max_concurrent=4)
    assert too_much(of, Amounts(10, 500, 4)) is None and too_much(key(), limited(key(), Amounts(99, 99, 99))) is None
    for need, limit in (
        (Amounts(tokens=1001), "tokens"),
        (Amounts(tokens=501), "day"),
        (Amounts(requests=11), "requests"),
        (Amounts(slots=5), "concurrent"),
    ):
        refused = too_much(of, need)
        assert refused is not None and refused.is_final and refused.limit == limit


def test_a_days_tokens_are_for_that_day() -> None:
    of = key(tokens_per_day=100)
    taken = take_one(AccountRecord(), of, NOW, Amounts(tokens=80))
    assert isinstance(taken, Taken)
    refused = take_one(taken.record, of, NOW, Amounts(tokens=30))
    assert isinstance(refused, Refusal) and refused.limit == "day" and 0 < refused.retry_after_s <= DAY_S
    assert isinstance(take_one(taken.record, of, NOW + refused.retry_after_s, Amounts(tokens=30)), Taken)


def test_concurrent_requests_of_a_dead_router_do_not_count() -> None:
    of = key(max_concurrent=2)
    record = AccountRecord(slots={"r2": 2})
    refused = take_one(record, of, NOW, Amounts(slots=1))
    assert isinstance(refused, Refusal) and refused.limit == "concurrent"
    taken = take_one(record, of, NOW, Amounts(slots=1), dead="r2")
    assert isinstance(taken, Taken) and taken.record.slots == {"r1": 1}


def test_what_is_taken_in_advance_is_a_share_and_only_if_there_is_one() -> None:
    of = key(requests_per_minute=100, tokens_per_minute=10_000, max_concurrent=10)
    assert share(of) == Amounts(5, 500, 0)
    assert limited(key(), Amounts(1, 2, 3)) == NOTHING
    taken = take(AccountRecord(), of, Amounts(98), share(of), router="r", is_alive=lambda name: True, now=NOW)
    assert isinstance(taken, Taken) and taken.amounts == Amounts(100, 500, 0)


def test_an_account_gives_back_what_lies_unused_and_charges_its_debt() -> None:
    account = Account(key(requests_per_minute=100, tokens_per_minute=10_000), now=0.0)
    account.spare = Amounts(5, 400)
    assert account.try_use(Amounts(1, 300), 0.0) and not account.try_use(Amounts(1, 300), 0.0)
    account.settle(-250)
    assert account.spare == Amounts(4, -150)
    assert account.surplus(0.5) == Amounts(0, -650), "the debt, and a share to go on with"
    account.settle(1500)
    assert account.surplus(0.5) == Amounts(0, 850) and account.surplus(5.0) == Amounts(4, 1350)


def test_headers_tell_what_is_left() -> None:
    account = Account(key(requests_per_minute=60, tokens_per_minute=600), now=0.0)
    account.see(charge(AccountRecord(), account.key, Amounts(3, 60), "r", NOW), 1)
    account.spare = Amounts(2, 10)
    told = {name.decode(): value.decode() for name, value in account.headers(NOW)}
    assert told == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "550",
        "x-ratelimit-reset-tokens": "5s",
    }
    assert remaining(NOW + 60, 60, 0, NOW) == 0 and reset_s(NOW + 60, 60, 0, NOW) == 60.0
    assert Account(key(), 0.0).headers(NOW) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0s"), (0.012, "12ms"), (1.0, "1s"), (1.5, "1.5s"), (360.0, "6m0s"), (3723.0, "1h2m3s")]
)
def test_durations_read_as_go_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_half_of_a_rate_is_left_until_less_than_that_remains_for_those_who_wait_too() -> None:
    account = Account(key(requests_per_minute=60, tokens_per_minute=600), now=0.0)
    assert account.leaves_half(NOW)
    account.see(AccountRecord(requests_at=NOW + 30.0, tokens_at=NOW + 10.0), 1)
    assert account.leaves_half(NOW) and not account.leaves_half(NOW - 1.0)
    account.wanted = Amounts(requests=1)
    assert not account.leaves_half(NOW) and account.leaves_half(NOW + 1.0)
    account.wanted = Amounts(tokens=201)
    assert not account.leaves_half(NOW)
    assert Account(key(), 0.0).leaves_half(NOW)
