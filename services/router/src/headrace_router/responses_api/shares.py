"""How much of the store of responses each owner has filled in the last day. Pure.

Each router counts what it stores itself and tells the others; what counts is the sum, hour by hour. Nobody changes what
another one has counted, so nothing can be lost between them, and the count of a router that is gone goes on counting.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

PERIOD_S = 3600.0
NUM_PERIODS = 25
"""Responses are kept for a day: longer than that nothing counts."""
MAX_OWNERS = 100_000
"""Whose responses are counted here. Who has stored nothing for the longest is forgotten first."""
MAX_TOLD = 100_000
"""Counts of other routers, each of one owner."""


class ShareRecord(Struct, frozen=True, tag=True, kw_only=True):
    """In the bucket RESPONSE_SHARES: what one router has stored of one owner."""

    filled: dict[int, int]
    """Bytes by hour since the epoch. Below 0 where it has deleted what others had stored."""


class Shares:
    def __init__(self, most: int, now: Callable[[], float]) -> None:
        """`most`: bytes of one owner. `now`: seconds since the epoch."""
        self._most = most
        self._now = now
        self._own: dict[str, dict[int, int]] = {}
        """owner -> hour -> bytes"""
        self._told: dict[str, dict[str, Mapping[int, int]]] = {}
        """owner -> whose count -> hour -> bytes"""
        self._num_told = 0
        self._changed: dict[str, None] = {}

    def has_room(self, owner: str, num_bytes: int) -> bool:
        oldest = self._oldest()
        by_hour: dict[int, int] = {}
        for count in (self._own.get(owner, {}), *self._told.get(owner, {}).values()):
            for hour, size in count.items():
                if hour >= oldest:
                    by_hour[hour] = by_hour.get(hour, 0) + size
        # Each hour for itself: what was taken away in one must not make room for more once that hour is forgotten.
        return sum(max(0, size) for size in by_hour.values()) + num_bytes <= self._most

    def fill(self, owner: str, num_bytes: int) -> None:
        self._add(owner, self._hour(self._now()), num_bytes)

    def free(self, owner: str, num_bytes: int, stored_at: float) -> None:
        """`stored_at`: seconds since the epoch. Whoever has stored it."""
        self._add(owner, self._hour(stored_at), -num_bytes)

    def tell(self, owner: str, writer: str, record: ShareRecord | None) -> None:
        """What another router has counted; None: it is forgotten."""
        counts = self._told.setdefault(owner, {})
        if record is None:
            self._num_told -= counts.pop(writer, None) is not None
        elif writer in counts or self._num_told < MAX_TOLD:
            self._num_told += writer not in counts
            counts[writer] = record.filled
        if not counts:
            del self._told[owner]

    def take_changed(self) -> list[str]:
        """Owners whose count is to be told to the others."""
        changed, self._changed = list(self._changed), {}
        return changed

    def put_back(self, owners: Iterable[str]) -> None:
        """They could not be told."""
        self._changed.update(dict.fromkeys(owners))

    def record_of(self, owner: str) -> ShareRecord | None:
        """For the others; None: it is forgotten."""
        count = self._own.get(owner)
        return None if count is None else ShareRecord(filled=dict(count))

    def _add(self, owner: str, hour: int, num_bytes: int) -> None:
        count = self._own.pop(owner, {})
        count[hour] = count.get(hour, 0) + num_bytes
        oldest = self._oldest()
        self._own[owner] = {hour: size for hour, size in count.items() if hour >= oldest}
        if len(self._own) > MAX_OWNERS:
            forgotten = next(iter(self._own))
            del self._own[forgotten]
            self._changed.pop(forgotten, None)
        self._changed[owner] = None

    def _oldest(self) -> int:
        return self._hour(self._now()) - NUM_PERIODS + 1

    @staticmethod
    def _hour(at: float) -> int:
        return int(at // PERIOD_S)
