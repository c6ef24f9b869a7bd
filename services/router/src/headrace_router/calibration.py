"""How far predicted waits are from the real ones, and the correction that follows. Pure."""

import math

MIN_WAIT_S = 0.5
"""Shorter waits are mostly not waiting: they teach nothing."""
STEP = 0.05
MAX_BIAS = math.log(3.0)
QUANTILE = 0.98
FIRST_MARGIN = 1.25
MIN_MARGIN, MAX_MARGIN = 1.05, 2.5


class Calibration:
    """Of one model."""

    def __init__(self) -> None:
        self._bias = 0.0
        """Logarithm of actual / predicted, on average."""
        self._margin = math.log(FIRST_MARGIN)
        """That quotient's high quantile, around the corrected prediction."""
        self.num_observed = 0

    @property
    def factor(self) -> float:
        """Predictions are multiplied by it."""
        return math.exp(self._bias)

    @property
    def margin(self) -> float:
        """A corrected prediction times this is seldom exceeded."""
        return math.exp(self._margin)

    def observe(self, predicted_s: float, actual_s: float, factor: float) -> None:
        """`predicted_s` had been corrected by `factor`."""
        if max(predicted_s, actual_s) < MIN_WAIT_S:
            return
        self.num_observed += 1
        error = math.log(max(actual_s, MIN_WAIT_S / 2) / max(predicted_s, MIN_WAIT_S / 2))
        raw = min(2 * MAX_BIAS, max(-2 * MAX_BIAS, error + math.log(factor)))
        self._bias = min(MAX_BIAS, max(-MAX_BIAS, self._bias + STEP * (raw - self._bias)))
        # Stochastic approximation of a quantile (Robbins and Monro, 1951).
        moved = self._margin + STEP * (QUANTILE if error > self._margin else QUANTILE - 1.0)
        self._margin = min(math.log(MAX_MARGIN), max(math.log(MIN_MARGIN), moved))


def relative_error(predicted_s: float, actual_s: float) -> float:
    return abs(predicted_s - actual_s) / max(actual_s, 1e-3)
