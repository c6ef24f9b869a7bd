"""One key's account as one router has it: what it took in advance, and what of that is in use. Pure."""

import math

from msgspec.structs import replace

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


class Write:
    """A change of the record on its way to the broker."""

    def __init__(self, record: AccountRecord, revision: int, amounts: Amounts) -> None:
        """`revision`: of the record that it replaces. `amounts`: what it charges; negative parts are given back."""
        self.record = record
        self.revision = revision
        self.amounts = amounts
        self.is_doubtful = False
        """The broker may have made it, or may make it still."""


class Account:
    def __init__(self, key: ApiKey, now: float) -> None:
        """`now` is monotonic, in seconds."""
        self.key = key
        self.record = AccountRecord()
        """As last seen."""
        self.revision = 0
        self.spare = Amounts()
        """Taken and not used; below zero: used beyond what was charged."""
        self.write: Write | None = None
        """One at a time: until it is known what became of it, no other begins."""
        self.num_running = 0
        """Sequences of calls, whatever limits the key has: what they used beyond their estimate is charged when they
        end."""
        self.wanted = Amounts()
        """By calls that wait for this router to take more."""
        self.used_at = now

    def see(self, record: AccountRecord, revision: int) -> None:
        """Changes come late and in any order."""
        if self.write is not None and record.write_id == self.write.record.write_id:
            self.made()
        if revision > self.revision:
            self.record, self.revision = record, revision

    def begin(self, record: AccountRecord, amounts: Amounts) -> Write:
        self.write = Write(record, self.revision, amounts)
        # What is given back must not be used meanwhile.
        self.spare = self.spare.plus(amounts.minus(amounts.positive))
        return self.write

    def made(self) -> None:
        """The broker has made the write."""
        if self.write is not None:
            self.spare = self.spare.plus(self.write.amounts.positive)
            self.write = None

    def not_made(self) -> None:
        """Nor ever will be. If that is doubtful, the key is charged twice rather than given anything back twice."""
        if self.write is not None:
            if not self.write.is_doubtful:
                self.spare = self.spare.minus(self.write.amounts.minus(self.write.amounts.positive))
            self.write = None

    def current(self, router: str) -> AccountRecord:
        """The record with the slots that this router has, whatever it says of them: others may have taken us for dead
        and given them away, or a write was made twice."""
        others = {name: held for name, held in self.record.slots.items() if name != router}
        return replace(self.record, slots=others | ({router: self._num_slots} if self._num_slots else {}))

    def try_use(self, need: Amounts, now: float, num_at_once: int = 1) -> bool:
        """`num_at_once`: sequences, whether or not they are limited."""
        self.used_at = now
        if not self.spare.covers(need):
            return False
        self.spare = self.spare.minus(need)
        self.num_running += num_at_once
        return True

    def extra(self, need: Amounts) -> Amounts:
        """To take with what is needed: what others wait for, and a share."""
        return limited(self.key, self.wanted.minus(need).positive.plus(share(self.key)))

    def lacking(self, need: Amounts) -> Amounts:
        """What of the need is not here."""
        return need.minus(self.spare).positive

    def settle(self, num_tokens: int, num_requests: int = 0) -> None:
        """So many more tokens and requests (or less, if negative) were charged than used."""
        self.spare = self.spare.plus(limited(self.key, Amounts(num_requests, num_tokens)))

    def leave(self, num_at_once: int = 1) -> None:
        """A call of so many sequences has ended."""
        self.num_running -= num_at_once
        if self.key.max_concurrent:
            self.spare = self.spare.plus(Amounts(slots=num_at_once))

    def surplus(self, now: float, *, is_closing: bool = False) -> Amounts:
        """What is to be given back; negative parts are a debt to be charged."""
        if is_closing or now - self.used_at >= IDLE_S:
            return self.spare
        pairs = zip(self.spare, share(self.key), strict=True)
        return Amounts(*(have - kept if have > KEPT_SHARES * kept or have < 0 else 0 for have, kept in pairs))

    def has_slots_of(self, router: str) -> bool:
        """The record says of this router's slots what is true."""
        return self.record.slots.get(router, 0) == self._num_slots

    @property
    def _num_slots(self) -> int:
        return self.num_running + self.spare.slots if self.key.max_concurrent else 0

    @property
    def is_unused(self) -> bool:
        is_idle = not self.num_running and self.write is None
        return is_idle and self.spare == Amounts() and self.wanted == Amounts()

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """`now` by the broker's clock. As OpenAI's; what other routers have taken in advance counts as used."""
        found = []
        for name, limit, full_at, spare in self._rates():
            if limit and math.isfinite(now):
                found += [
                    (f"x-ratelimit-limit-{name}", str(limit)),
                    (f"x-ratelimit-remaining-{name}", str(remaining(full_at, limit, spare, now))),
                    (f"x-ratelimit-reset-{name}", duration(min(PERIOD_S, reset_s(full_at, limit, spare, now)))),
                ]
        return [(name.encode(), value.encode()) for name, value in found]

    def leaves_half(self, now: float) -> bool:
        """Of each limit a minute at least half is left, what others wait for taken off. `now` by the broker's clock."""
        wanted = {"requests": self.wanted.requests, "tokens": self.wanted.tokens}
        return all(
            2 * (remaining(full_at, limit, spare, now) - wanted[name]) >= limit
            for name, limit, full_at, spare in self._rates()
            if limit and math.isfinite(now)
        )

    def _rates(self) -> tuple[tuple[str, int, float, int], ...]:
        """(name, limit a minute, when it is full again, what is spare here)"""
        key, record = self.key, self.record
        return (
            ("requests", key.requests_per_minute, record.requests_at, self.spare.requests),
            ("tokens", key.tokens_per_minute, record.tokens_at, self.spare.tokens),
        )
