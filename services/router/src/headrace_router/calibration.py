"""How far predicted waits are from the real ones, and the correction that follows. Pure."""

import math

MIN_WAIT_S = 0.5
"""Shorter waits are mostly not waiting: they teach nothing."""
STEP = 0.05
BIAS_PERIOD_S = 0.25
MARGIN_PERIOD_S = 1.0
"""Requests whose waits end within such a time have met the same hiccup and say one thing, not many: a margin that jumps
would refuse those who come back as they were told."""
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
        self._observed_at = -math.inf

    @property
    def factor(self) -> float:
        """Predictions are multiplied by it."""
        return math.exp(self._bias)

    @property
    def margin(self) -> float:
        """A corrected prediction times this is seldom exceeded."""
        return math.exp(self._margin)

    def observe(self, predicted_s: float, actual_s: float, factor: float, now: float) -> None:
        """`predicted_s` had been corrected by `factor`; `now` in seconds."""
        if max(predicted_s, actual_s) < MIN_WAIT_S:
            return
        self.num_observed += 1
        passed_s, self._observed_at = now - self._observed_at, now
        error = math.log(max(actual_s, MIN_WAIT_S / 2) / max(predicted_s, MIN_WAIT_S / 2))
        raw = min(2 * MAX_BIAS, max(-2 * MAX_BIAS, error + math.log(factor)))
        step = STEP * min(1.0, passed_s / BIAS_PERIOD_S)
        self._bias = min(MAX_BIAS, max(-MAX_BIAS, self._bias + step * (raw - self._bias)))
        # Stochastic approximation of a quantile (Robbins and Monro, 1951).
        step = STEP * min(1.0, passed_s / MARGIN_PERIOD_S)
        moved = self._margin + step * (QUANTILE if error > self._margin else QUANTILE - 1.0)
        self._margin = min(math.log(MAX_MARGIN), max(math.log(MIN_MARGIN), moved))


def relative_error(predicted_s: float, actual_s: float) -> float:
    return abs(predicted_s - actual_s) / max(actual_s, 1e-3)
