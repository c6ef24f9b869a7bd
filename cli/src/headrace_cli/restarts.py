"""Whether and when a dead service is started again. Pure."""

MAX_SHORT_LIVES = 5
"""So many deaths in a row without a stable life between them, and it is given up."""
STABLE_LIFE_S = 60.0
"""A process that was ready and lived so long proves that it can live."""
MIN_DELAY_S = 0.5
MAX_DELAY_S = 10.0


def is_stable(lifetime_s: float, was_ready: bool) -> bool:
    return was_ready and lifetime_s >= STABLE_LIFE_S


def next_delay(num_short_lives: int, *, has_served: bool = False) -> float | None:
    """Seconds until the next start after this many short lives in a row (0: it was stable); None: give it up.
    `has_served`: the last of them was one of an instance that runs, and did its work. Then it is always started again:
    what ends it so often, a kernel short of memory or some requests, may pass, and all else would end with it."""
    if num_short_lives >= MAX_SHORT_LIVES and not has_served:
        return None
    return min(MAX_DELAY_S, MIN_DELAY_S * 2.0 ** min(max(0, num_short_lives - 1), 30))
