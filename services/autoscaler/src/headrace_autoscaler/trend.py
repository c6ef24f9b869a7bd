"""How fast requests come, and how that changes: two moving averages of the arrivals. Pure."""

from math import exp, sqrt
from typing import NamedTuple

FAST_S = 45.0
SLOW_S = 240.0
"""An average of time constant T lags a steady ramp by T, so the two differ by slope x (SLOW_S - FAST_S)."""
MAX_GAP_S = 120.0
"""After a longer silence the averages start anew."""
SIGNIFICANT = 2.5
"""Standard deviations (of a Poisson process) by which the two must differ before that is called a trend."""
MAX_GROWTH = 2.0
"""A forecast is at most so many times the present."""


class Trend(NamedTuple):
    fast: float = 0.0
    """Requests a second."""
    slow: float = 0.0
    counted: int | None = None
    at: float = 0.0
    age_s: float = 0.0
    """Time that went into the averages: young ones are divided by the weight they have so far."""

    def after(self, num_arrived: int, now: float) -> "Trend":
        """With the counter's next reading. One that fell, or comes late, gives no rate: its counting starts here."""
        elapsed_s = now - self.at
        if self.counted is None or num_arrived < self.counted:
            return self._replace(counted=num_arrived, at=now)
        if elapsed_s <= 0:
            return self
        if elapsed_s > MAX_GAP_S:
            return Trend(counted=num_arrived, at=now)
        rate = (num_arrived - self.counted) / elapsed_s
        fast = _step(self.fast, rate, elapsed_s / FAST_S)
        slow = _step(self.slow, rate, elapsed_s / SLOW_S)
        return Trend(fast, slow, num_arrived, now, min(self.age_s + elapsed_s, 100 * SLOW_S))

    @property
    def rate(self) -> float:
        """Requests a second of late."""
        return self.fast / self._weight(FAST_S) if self.age_s else 0.0

    @property
    def growth_per_s(self) -> float:
        """Requests a second, each second; 0 unless the rise stands out from chance. A fall is not foretold."""
        if self.age_s < FAST_S:
            return 0.0
        rise = self.rate - self.slow / self._weight(SLOW_S)
        chance = sqrt(max(self.rate, 0.0) / (2 * FAST_S))
        return rise / (SLOW_S - FAST_S) if rise > SIGNIFICANT * chance else 0.0

    def forecast(self, horizon_s: float) -> float:
        """Requests a second, so long from now: the ramp goes on. The fast average's own lag is made up for."""
        return min(self.rate + self.growth_per_s * (FAST_S + horizon_s), MAX_GROWTH * self.rate)

    def _weight(self, constant_s: float) -> float:
        return 1 - exp(-self.age_s / constant_s)


def _step(average: float, value: float, part: float) -> float:
    return average + (value - average) * (1 - exp(-part))
