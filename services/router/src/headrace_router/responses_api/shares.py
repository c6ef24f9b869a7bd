"""How much of the store of responses each owner has filled in the last day, as far as one router knows. Pure."""

from collections.abc import Callable

PERIOD_S = 3600.0
NUM_PERIODS = 25
"""Responses are kept for a day: longer than that nothing counts."""
MAX_OWNERS = 100_000
"""Who has stored nothing for the longest is forgotten first."""


class Shares:
    def __init__(self, most: int, now: Callable[[], float]) -> None:
        """`most`: bytes of one owner. `now` is a monotonic clock, in seconds."""
        self._most = most
        self._now = now
        self._by_owner: dict[str, dict[int, int]] = {}
        """Bytes by period."""

    def has_room(self, owner: str, num_bytes: int) -> bool:
        oldest = self._period() - NUM_PERIODS + 1
        periods = self._by_owner.get(owner, {})
        return sum(size for period, size in periods.items() if period >= oldest) + num_bytes <= self._most

    def fill(self, owner: str, num_bytes: int) -> None:
        now = self._period()
        periods = self._by_owner.pop(owner, {})
        periods[now] = periods.get(now, 0) + num_bytes
        self._by_owner[owner] = {period: size for period, size in periods.items() if period > now - NUM_PERIODS}
        if len(self._by_owner) > MAX_OWNERS:
            del self._by_owner[next(iter(self._by_owner))]

    def free(self, owner: str, num_bytes: int) -> None:
        """The newest first; no error if another router had stored it."""
        periods = self._by_owner.get(owner, {})
        for period in sorted(periods, reverse=True):
            given = min(num_bytes, periods[period])
            periods[period] -= given
            num_bytes -= given

    def _period(self) -> int:
        return int(self._now() // PERIOD_S)
