"""A histogram of durations with buckets 2 % apart, so that hundreds of millions of values fit into a few kilobytes and
every percentile is within 1 %. Pure."""

import math
from collections.abc import Iterator

LEAST_S = 1e-5
GROWTH = 1.02
NUM_BUCKETS = 1 + math.ceil(math.log(1e4 / LEAST_S) / math.log(GROWTH))
"""The last one holds all above 10,000 s."""

_SCALE = 1.0 / math.log(GROWTH)


class Histogram:
    def __init__(self) -> None:
        self._counts = [0] * NUM_BUCKETS
        self.num_values = 0
        self.total_s = 0.0
        self.largest_s = 0.0

    def add(self, seconds: float) -> None:
        index = int(math.log(seconds / LEAST_S) * _SCALE) + 1 if seconds > LEAST_S else 0
        self._counts[min(index, NUM_BUCKETS - 1)] += 1
        self.num_values += 1
        self.total_s += seconds
        self.largest_s = max(self.largest_s, seconds)

    def percentile(self, percent: float) -> float | None:
        """Seconds, the middle of the value's bucket; None without values."""
        if not self.num_values:
            return None
        wanted = percent / 100.0 * self.num_values
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(_middle(index), self.largest_s)
        return self.largest_s

    def filled(self) -> Iterator[tuple[float, int]]:
        """(seconds, count) of the buckets that hold anything, in rising order."""
        for index, count in enumerate(self._counts):
            if count:
                yield _middle(index), count


def _middle(index: int) -> float:
    return LEAST_S * float(GROWTH ** (index - 0.5)) if index else LEAST_S
