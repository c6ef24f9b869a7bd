"""A histogram for what happens with every token or iteration: an observation costs a bisection and two additions.

Not for several threads, unlike prometheus_client's.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily, Metric


class Tally:
    """One set of label values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Tallies:
    """A collector: the tallies of one name by their label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = bounds
        self._by_values: dict[tuple[str, ...], Tally] = {}

    def labels(self, *values: str) -> Tally:
        """As many values as there are labels: kept for good, so their number must be bounded."""
        tally = self._by_values.get(values)
        if tally is None:
            assert len(values) == len(self._labels), (self._name, values)
            tally = self._by_values[values] = Tally(self._bounds)
        return tally

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(str, self._bounds), "+Inf"]
        for values, tally in self._by_values.items():
            family.add_metric(values, list(zip(names, accumulate(tally.counts), strict=True)), tally.total)
        yield family

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)
