"""Whether and when a dead service is started again. Pure."""

MAX_SHORT_LIVES = 5
"""So many deaths in a row without a life that proves that it can live, and it is given up."""
STABLE_LIFE_S = 60.0
"""A process that was ready and lived so long proves it."""
MIN_DELAY_S = 0.5
MAX_DELAY_S = 10.0
_MOST_DOUBLINGS = 30


class Restarts:
    """Of one service."""

    def __init__(self) -> None:
        self._num_short_lives = 0
        self._num_fruitless_lives = 0

    def delay_after(self, lifetime_s: float, *, was_ready: bool, is_complete: bool) -> float | None:
        """Seconds until the next start; None: give it up. `is_complete`: the instance runs. What did its work in one is
        always started again: what ends it so often, a kernel short of memory or some requests, may pass, and all else
        would end with it."""
        is_stable = was_ready and lifetime_s >= STABLE_LIFE_S
        self._num_short_lives = 0 if is_stable else self._num_short_lives + 1
        has_served = is_stable or (was_ready and is_complete)
        self._num_fruitless_lives = 0 if has_served else self._num_fruitless_lives + 1
        if self._num_fruitless_lives >= MAX_SHORT_LIVES:
            return None
        num_doublings = min(_MOST_DOUBLINGS, max(0, self._num_short_lives - 1))
        return min(MAX_DELAY_S, MIN_DELAY_S * 2.0**num_doublings)
