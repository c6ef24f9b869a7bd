"""What an API key may still use. Pure: time is an argument, in seconds since the epoch by the broker's clock.

Requests and tokens a minute: the generic cell rate algorithm (ITU-T I.371). A limit of L a minute is a bucket of L that
fills evenly; `*_at` is the time at which it will be full again. Any span of s seconds sees at most L * (1 + s / 60).

Routers take from the account in advance, a share of each limit at a time, and give back what they do not use. So most
requests cost no message at all, no router can exceed what is left, and what lies unused at others is all that anyone
can be refused too early: a share for each other router, until it gives that back a second later.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from headrace_shared.api_keys import ApiKey

PERIOD_S = 60.0
DAY_S = 86_400.0
CLOCK_STEP_S = 30.0
"""Brokers' clocks differ by less."""
SHARES = 20
"""A router takes a limit's twentieth at a time."""


class AccountRecord(Struct, frozen=True, tag=True, kw_only=True):
    """What was taken on one key, by all routers together. In the bucket ACCOUNTS."""

    requests_at: float = 0.0
    tokens_at: float = 0.0
    day: int = 0
    """Since the epoch."""
    day_tokens: int = 0
    slots: dict[str, int] = {}
    """Router -> how many concurrent requests it may have. Counts only while the router lives."""
    write_id: int = 0
    """Drawn anew for each write, so that a router whose answer was lost knows its own again: others' may be equal."""


class Amounts(NamedTuple):
    requests: int = 0
    tokens: int = 0
    slots: int = 0

    def plus(self, other: "Amounts") -> "Amounts":
        return Amounts(self.requests + other.requests, self.tokens + other.tokens, self.slots + other.slots)

    def minus(self, other: "Amounts") -> "Amounts":
        return Amounts(self.requests - other.requests, self.tokens - other.tokens, self.slots - other.slots)

    @property
    def positive(self) -> "Amounts":
        return Amounts(*(max(0, amount) for amount in self))

    def covers(self, other: "Amounts") -> bool:
        return self.requests >= other.requests and self.tokens >= other.tokens and self.slots >= other.slots


class Refusal(NamedTuple):
    limit: Literal["requests", "tokens", "day", "concurrent"]
    retry_after_s: float
    is_final: bool = False
    """It asks for more than the limit ever gives at once."""


class Taken(NamedTuple):
    record: AccountRecord
    amounts: Amounts


def limited(key: ApiKey, amounts: Amounts) -> Amounts:
    """Without what the key has no limit of."""
    has_tokens = key.tokens_per_minute or key.tokens_per_day
    return Amounts(
        amounts.requests if key.requests_per_minute else 0,
        amounts.tokens if has_tokens else 0,
        amounts.slots if key.max_concurrent else 0,
    )


def share(key: ApiKey) -> Amounts:
    """What to take beyond what is needed: nothing of small limits, which are exact."""
    tokens = [limit for limit in (key.tokens_per_minute, key.tokens_per_day) if limit]
    return Amounts(
        key.requests_per_minute // SHARES, min(tokens) // SHARES if tokens else 0, key.max_concurrent // SHARES
    )


def too_much(key: ApiKey, need: Amounts) -> Refusal | None:
    """Of a call that asks for more than a limit ever gives at once. `need` is `limited`."""
    if key.tokens_per_minute and need.tokens > key.tokens_per_minute:
        return Refusal("tokens", PERIOD_S, is_final=True)
    if key.tokens_per_day and need.tokens > key.tokens_per_day:
        return Refusal("day", PERIOD_S, is_final=True)
    if need.requests > key.requests_per_minute:
        return Refusal("requests", PERIOD_S, is_final=True)
    if need.slots > key.max_concurrent:
        return Refusal("concurrent", PERIOD_S, is_final=True)
    return None


def take(
    record: AccountRecord,
    key: ApiKey,
    need: Amounts,
    extra: Amounts,
    *,
    router: str,
    is_alive: Callable[[str], bool],
    now: float,
) -> Taken | Refusal:
    """`need`, which is not `too_much`, or nothing, and of `extra` what there is. Both are `limited`."""
    record = _up_to_date(record, is_alive, router, now)
    requests = _left(record.requests_at, key.requests_per_minute, now)
    tokens = _left(record.tokens_at, key.tokens_per_minute, now)
    today = key.tokens_per_day - record.day_tokens if key.tokens_per_day else math.inf
    slots = key.max_concurrent - sum(record.slots.values()) if key.max_concurrent else math.inf
    if need.tokens > today:
        return Refusal("day", (int(now // DAY_S) + 1) * DAY_S - now)
    if need.requests > requests:
        return Refusal("requests", _until(record.requests_at, key.requests_per_minute, need.requests, now))
    if need.tokens > tokens:
        return Refusal("tokens", _until(record.tokens_at, key.tokens_per_minute, need.tokens, now))
    if need.slots > slots:
        return Refusal("concurrent", 1.0)
    amounts = Amounts(
        int(min(need.requests + extra.requests, requests)),
        int(min(need.tokens + extra.tokens, tokens, today)),
        int(min(need.slots + extra.slots, slots)),
    )
    return Taken(charge(record, key, amounts, router, now), amounts)


def charge(record: AccountRecord, key: ApiKey, amounts: Amounts, router: str, now: float) -> AccountRecord:
    """Whatever is left: negative amounts are given back, and positive ones may be a debt."""
    slots = record.slots.get(router, 0) + amounts.slots
    others = {name: held for name, held in record.slots.items() if name != router}
    return replace(
        record,
        requests_at=_after(record.requests_at, key.requests_per_minute, amounts.requests, now),
        tokens_at=_after(record.tokens_at, key.tokens_per_minute, amounts.tokens, now),
        day=int(now // DAY_S),
        day_tokens=max(0, (record.day_tokens if record.day == int(now // DAY_S) else 0) + amounts.tokens),
        slots=others | ({router: slots} if slots > 0 else {}),
    )


def remaining(full_at: float, limit: int, spare: int, now: float) -> int:
    """`spare`: taken in advance and not used."""
    left = _left(full_at, limit, now)
    return max(0, min(limit, int(left) + spare)) if limit else 0


def reset_s(full_at: float, limit: int, spare: int, now: float) -> float:
    """Until the limit is whole again."""
    return max(0.0, full_at - now - spare * PERIOD_S / limit)


def duration(seconds: float) -> str:
    """As Go writes it, which is how clients read these headers: 12ms, 1.5s, 6m0s, 1h2m3s."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60}m{text}"
    return f"{minutes}m{text}" if minutes else text


def _up_to_date(record: AccountRecord, is_alive: Callable[[str], bool], router: str, now: float) -> AccountRecord:
    day = int(now // DAY_S)
    slots = {name: held for name, held in record.slots.items() if name == router or is_alive(name)}
    # Requests are counted before they are let in: it is later than that only if the clock was set back.
    requests_at = record.requests_at if record.requests_at <= now + PERIOD_S + CLOCK_STEP_S else 0.0
    day_tokens = record.day_tokens if record.day == day else 0
    return replace(record, slots=slots, requests_at=requests_at, day=day, day_tokens=day_tokens)


def _left(full_at: float, limit: int, now: float) -> float:
    """What the bucket holds; it may be below 0. Infinite without a limit."""
    if not limit:
        return math.inf
    # A hair more, since sums of many parts of a second are not exact.
    return math.floor((PERIOD_S - max(0.0, full_at - now)) * limit / PERIOD_S + 1e-6)


def _until(full_at: float, limit: int, need: int, now: float) -> float:
    return max(0.0, full_at - now) + need * PERIOD_S / limit - PERIOD_S


def _after(full_at: float, limit: int, count: int, now: float) -> float:
    return max(full_at, now) + count * PERIOD_S / limit if limit else 0.0
