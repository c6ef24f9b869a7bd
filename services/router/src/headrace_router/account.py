"""One key's account as one router has it: what it took in advance, and what of that is in use. Pure."""

import math

from headrace_router.rate_limits import (
    PERIOD_S,
    AccountRecord,
    Amounts,
    duration,
    limited,
    remaining,
    reset_s,
    share,
)
from headrace_shared.api_keys import ApiKey

KEPT_SHARES = 2
"""More than so many shares unused are given back at once, not when the key falls silent."""
IDLE_S = 1.0
"""Unused since so long, everything is given back."""


class Account:
    def __init__(self, key: ApiKey, now: float) -> None:
        """`now` is monotonic, in seconds."""
        self.key = key
        self.record = AccountRecord()
        """As last seen."""
        self.revision = 0
        self.spare = Amounts()
        """Taken and not used; below zero: used beyond what was charged."""
        self.num_running = 0
        self.wanted = Amounts()
        """By calls that wait for this router to take more."""
        self.used_at = now

    def see(self, record: AccountRecord, revision: int) -> None:
        """Changes come late and in any order."""
        if revision > self.revision:
            self.record, self.revision = record, revision

    def try_use(self, need: Amounts, now: float) -> bool:
        self.used_at = now
        if not self.spare.covers(need):
            return False
        self.spare = self.spare.minus(need)
        self.num_running += need.slots
        return True

    def extra(self, need: Amounts) -> Amounts:
        """To take with what is needed: what others wait for, and a share."""
        others = self.wanted.minus(need)
        return limited(self.key, Amounts(*(max(0, amount) for amount in others)).plus(share(self.key)))

    def lacking(self, need: Amounts) -> Amounts:
        """What of the need is not here."""
        return Amounts(*(max(0, amount) for amount in need.minus(self.spare)))

    def settle(self, num_tokens: int) -> None:
        """So many more tokens (or less, if negative) were charged than used."""
        self.spare = self.spare.plus(limited(self.key, Amounts(tokens=num_tokens)))

    def leave(self) -> None:
        """A call has ended."""
        if self.key.max_concurrent:
            self.num_running -= 1
            self.spare = self.spare.plus(Amounts(slots=1))

    def surplus(self, now: float, *, is_closing: bool = False) -> Amounts:
        """What is to be given back; negative parts are a debt to be charged."""
        if is_closing or now - self.used_at >= IDLE_S:
            return self.spare
        pairs = zip(self.spare, share(self.key), strict=True)
        return Amounts(*(have - kept if have > KEPT_SHARES * kept or have < 0 else 0 for have, kept in pairs))

    def slots_missing(self, router: str) -> int:
        """Others took us for dead and gave our slots away: we still run what we run."""
        return max(0, self.num_running - self.record.slots.get(router, 0)) if self.key.max_concurrent else 0

    @property
    def is_unused(self) -> bool:
        return self.spare == Amounts() and not self.num_running and self.wanted == Amounts()

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """`now` by the broker's clock. As OpenAI's; what other routers have taken in advance counts as used."""
        key, record = self.key, self.record
        found = []
        for name, limit, full_at, spare in (
            ("requests", key.requests_per_minute, record.requests_at, self.spare.requests),
            ("tokens", key.tokens_per_minute, record.tokens_at, self.spare.tokens),
        ):
            if limit and math.isfinite(now):
                found += [
                    (f"x-ratelimit-limit-{name}", str(limit)),
                    (f"x-ratelimit-remaining-{name}", str(remaining(full_at, limit, spare, now))),
                    (f"x-ratelimit-reset-{name}", duration(min(PERIOD_S, reset_s(full_at, limit, spare, now)))),
                ]
        return [(name.encode(), value.encode()) for name, value in found]
