"""The sequences that wait for a worker, and who may be admitted before whom.

Oldest arrival first. Preempted sequences and those that lost their worker arrived before the fresh ones, so they stand
in front. If the oldest does not fit anywhere now, younger ones may pass it (of the next LOOKAHEAD), but only
MAX_BYPASSED times: then one worker that could hold it is reserved, and admits nobody younger until it has drained.
So a big request neither freezes the queue nor starves.
"""

from bisect import bisect_left
from collections.abc import Iterator

from headrace_scheduler.sequence import Order, Sequence
from headrace_shared.messages import WorkerId

LOOKAHEAD = 8
MAX_BYPASSED = 32


class WaitingList:
    __slots__ = ("_orders", "_sequences", "reserved")

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._orders: list[Order] = []
        self.reserved: tuple[Sequence, WorkerId] | None = None
        """The sequence that was passed too often, and the worker kept for it."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, position: int) -> Sequence:
        return self._sequences[position]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        position = bisect_left(self._orders, sequence.order)
        self._orders.insert(position, sequence.order)
        self._sequences.insert(position, sequence)

    def remove(self, sequence: Sequence) -> None:
        position = bisect_left(self._orders, sequence.order)
        assert self._sequences[position] is sequence, sequence.order
        del self._orders[position]
        del self._sequences[position]
        sequence.num_bypassed = 0
        if self.reserved is not None and self.reserved[0] is sequence:
            self.reserved = None

    def check_integrity(self) -> None:
        """Raises AssertionError if the list is out of order or names a sequence twice."""
        assert self._orders == [sequence.order for sequence in self._sequences], self._orders
        assert self._orders == sorted(set(self._orders)), self._orders
