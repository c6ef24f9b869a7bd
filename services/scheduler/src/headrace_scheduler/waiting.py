"""The sequences that wait for a worker, and who may be admitted before whom.

By class, highest first; within a class those that ran before, oldest first; then the tenant that was served least
(`fairness.py`), and of its own the oldest arrival. Whoever waits long rises a class, so that none starves.

If the first does not fit anywhere now, others may pass it (the next LOOKAHEAD), but only MAX_BYPASSED times: then one
worker that could hold it is reserved, and admits nobody behind it until it has drained. So a big request neither
freezes the queue nor starves.
"""

from bisect import bisect_left
from collections.abc import Iterator

from headrace_scheduler.fairness import TOP_LEVEL, TenantShare
from headrace_scheduler.sequence import Order, Sequence
from headrace_shared.messages import WorkerId

LOOKAHEAD = 8
MAX_BYPASSED = 32
AGING_S = 30.0
"""Whoever has waited for so long rises a class."""

_Key = tuple[int, str]
"""Level and tenant."""


class _Group:
    """One tenant's waiting sequences of one class, oldest first."""

    __slots__ = ("level", "orders", "sequences", "share")

    def __init__(self, level: int, share: TenantShare) -> None:
        self.level = level
        self.share = share
        self.sequences: list[Sequence] = []
        self.orders: list[Order] = []


class WaitingList:
    __slots__ = ("_groups", "reserved")

    def __init__(self) -> None:
        self._groups: dict[_Key, _Group] = {}
        """Without empty ones."""
        self.reserved: tuple[Sequence, WorkerId] | None = None
        """A sequence that must get in next, and the worker kept for it."""

    def __len__(self) -> int:
        return sum(len(group.sequences) for group in self._groups.values())

    def __iter__(self) -> Iterator[Sequence]:
        for group in self._groups.values():
            yield from group.sequences

    def add(self, sequence: Sequence) -> None:
        key = _key(sequence)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(sequence.level, sequence.request.share)
        position = bisect_left(group.orders, sequence.order)
        group.orders.insert(position, sequence.order)
        group.sequences.insert(position, sequence)

    def remove(self, sequence: Sequence) -> None:
        self._take_out(sequence)
        sequence.num_bypassed = 0
        if self.reserved is not None and self.reserved[0] is sequence:
            self.reserved = None

    def promote(self, now: float) -> bool:
        """Whoever heads its group for too long rises a class. Whether anybody did."""
        aged = []
        for group in self._groups.values():
            if group.level < TOP_LEVEL:
                for sequence in group.sequences:
                    if now - sequence.at_level_since < AGING_S:
                        break
                    aged.append(sequence)
        for sequence in aged:
            self._take_out(sequence)
            sequence.level += 1
            sequence.at_level_since = now
            self.add(sequence)
        return bool(aged)

    def walk(self) -> "Walk":
        return Walk(self._groups)

    def check_integrity(self) -> None:
        """Raises AssertionError if a group is empty, out of order, not the sequence's own, or names one twice."""
        for key, group in self._groups.items():
            assert group.orders == [sequence.order for sequence in group.sequences], group.orders
            assert group.orders == sorted(set(group.orders)) and group.orders, group.orders
            assert {_key(sequence) for sequence in group.sequences} == {key}, key

    def _take_out(self, sequence: Sequence) -> None:
        key = _key(sequence)
        group = self._groups[key]
        position = bisect_left(group.orders, sequence.order)
        assert group.sequences[position] is sequence, sequence.order
        del group.orders[position]
        del group.sequences[position]
        if not group.sequences:
            del self._groups[key]


class Walk:
    """Through the list from the first on, while it changes."""

    __slots__ = ("_groups", "_num_skipped")

    def __init__(self, groups: dict[_Key, _Group]) -> None:
        self._groups = groups
        self._num_skipped: dict[_Key, int] = {}

    def next(self) -> Sequence | None:
        """The first that was not skipped."""
        first: Sequence | None = None
        first_key: tuple[int, bool, float, Order] | None = None
        for key, group in self._groups.items():
            position = self._num_skipped.get(key, 0) if self._num_skipped else 0
            if position < len(group.sequences):
                sequence = group.sequences[position]
                is_new = sequence.last_attempt is None
                place = (-group.level, is_new, group.share.counter if is_new else 0.0, sequence.order)
                if first_key is None or place < first_key:
                    first, first_key = sequence, place
        return first

    def skip(self, sequence: Sequence) -> None:
        """The last one that `next` gave stays where it is."""
        key = _key(sequence)
        self._num_skipped[key] = self._num_skipped.get(key, 0) + 1


def goes_before(sequence: Sequence, other: Sequence) -> bool:
    """Whether it may have a worker that is reserved for the other."""
    if sequence.level != other.level:
        return sequence.level > other.level
    is_kin = sequence.request.share is other.request.share or sequence.last_attempt is not None
    return is_kin and sequence.order < other.order


def _key(sequence: Sequence) -> _Key:
    return sequence.level, sequence.request.share.tenant
