"""How many requests have come into the queue that their routers have not told of yet, by the broker's numbers. Pure.

Requests of all routers and models are numbered in one stream. Each router tells what it has there, and up to which
number that is all. So when one of our own gets its number, those before it that are neither ours nor told must be
others', which will be heard of a moment later.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

MEMORY = 4096
"""Own requests: more than come within the time that loads take to be told."""
MAX_NEW = 1 << 20
"""More than come between two marks: it is another queue, whose numbers begin higher."""

Kind = tuple[str, bool]
"""Model, and whether it is of the batch lane."""


class Mark(NamedTuple):
    """What was known at a moment."""

    known: float
    """Who has a higher stream sequence was not; 0: nothing is known."""
    num_own: int


class Arrivals:
    """Of all models."""

    def __init__(self) -> None:
        self.newest = 0
        """Highest stream sequence heard of; 0: none since others could be heard."""
        self.num_own = 0
        """Since the start."""
        self._own: deque[tuple[int, Kind]] = deque()
        self._counts: Counter[Kind] = Counter()

    def add(self, sequence: int, kind: Kind) -> None:
        """One of our own."""
        self.newest = max(self.newest, sequence)
        self.num_own += 1
        self._own.append((sequence, kind))
        self._counts[kind] += 1
        if len(self._own) > MEMORY:
            _, oldest = self._own.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def hear(self, sequence: int) -> None:
        """Another router knows of it."""
        self.newest = max(self.newest, sequence)

    def forget(self) -> None:
        """Others could not be heard for a while: who came since did not all come just now."""
        self.newest = 0

    def mark(self, told: Sequence[int]) -> Mark:
        """`told`: up to which sequence each of the other routers has told all of its own; 0 if it does not say."""
        if not self.newest or not all(told):
            return Mark(0.0, self.num_own)
        ends = [sequence + self._num_own_after(sequence) for sequence in told] or [self.newest]
        # With several others it is not known whose the untold ones are; each has its share.
        return Mark(sum(ends) / len(ends), self.num_own)

    def untold(self, mark: Mark, kind: Kind) -> float:
        """Others' requests that were not known and are served before a newcomer of this kind."""
        return self._like(self.newest - mark.known - (self.num_own - mark.num_own), mark, kind)

    def before(self, mark: Mark, sequence: int, kind: Kind) -> float:
        """Requests that were not known, our own too, and are served before the one with this sequence."""
        return self._like(sequence - mark.known - 1.0, mark, kind)

    def _num_own_after(self, sequence: int) -> int:
        number = 0
        for own, _ in reversed(self._own):
            if own <= sequence:
                break
            number += 1
        return number

    def _like(self, num_requests: float, mark: Mark, kind: Kind) -> float:
        """As many of them as are of this model and no later lane, if others' are like our own."""
        if not 0.0 < num_requests <= MAX_NEW or not mark.known or not self._own:
            return 0.0
        model, is_batch = kind
        num_like = self._counts[model, False] + (self._counts[model, True] if is_batch else 0)
        return num_requests * num_like / len(self._own)
