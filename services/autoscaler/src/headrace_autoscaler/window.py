"""The largest of the values of a sliding window of time, in bounded memory. Pure."""

from typing import NamedTuple

NUM_SLICES = 64
"""A smaller value that follows within one slice of the window is not kept of its own."""


class Peaks(NamedTuple):
    since: float | None = None
    """Since when there has been a value all the time."""
    peaks: tuple[tuple[float, float], ...] = ()
    """(time, value), values falling: each was the largest from its time on."""

    def after(self, value: float, now: float, span_s: float) -> "Peaks":
        kept = [(at, peak) for at, peak in self.peaks if now - at <= span_s and peak > value]
        if not kept or now - kept[-1][0] > span_s / NUM_SLICES:
            kept.append((now, value))
        return Peaks(now if self.since is None else self.since, tuple(kept))

    def highest(self, now: float, span_s: float) -> float | None:
        """Of the last `span_s`; None unless they are all covered."""
        if self.since is None or now - self.since < span_s:
            return None
        return max((peak for at, peak in self.peaks if now - at <= span_s), default=None)

    def covered_in_s(self, now: float, span_s: float) -> float:
        """How long it takes until `highest` covers the whole window."""
        return span_s if self.since is None else max(0.0, self.since + span_s - now)
