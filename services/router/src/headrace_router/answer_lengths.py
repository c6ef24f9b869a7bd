"""How long answers get, by how long they may get. Pure.

Only requests say what is allowed (`max_tokens`), and most answers end before. So lengths are learnt, as a share of what
is allowed, for each power of two of it.
"""

import math
from typing import NamedTuple

UNSEEN_TOKENS = 256.0
"""Expected where nothing is known, if so much is allowed."""
MEMORY = 50.0
"""About so many of the last answers count."""
TRUST = 3.0
"""The guess counts like so many answers."""
MAX_SPREADS = 2.0


class Length(NamedTuple):
    """Tokens."""

    mean: float
    high: float
    """Seldom more."""


class _Shares:
    __slots__ = ("count", "mean", "square")

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.square = 0.0


class AnswerLengths:
    def __init__(self) -> None:
        self._shares: dict[int, _Shares] = {}

    def observe(self, max_tokens: int, num_tokens: int) -> None:
        """Of one choice that came to its end."""
        shares = self._shares.setdefault(max_tokens.bit_length(), _Shares())
        share = min(1.0, num_tokens / max_tokens)
        shares.count = min(MEMORY, shares.count + 1.0)
        weight = 1.0 / shares.count
        shares.mean += weight * (share - shares.mean)
        shares.square += weight * (share * share - shares.square)

    def expect(self, max_tokens: int, min_tokens: int = 0) -> Length:
        mean, spread = self._share(max_tokens)
        low = float(max(1, min_tokens))
        length = min(float(max_tokens), max(low, mean * max_tokens))
        return Length(length, min(float(max_tokens), length + MAX_SPREADS * spread * max_tokens))

    def left(self, max_tokens: int, num_done: int, min_tokens: int = 0) -> float:
        """Tokens still to come after `num_done`. Equal lengths count down; where lengths vary as those of exponential
        distributions do, what is to come does not depend on what has been."""
        mean, spread = self._share(max_tokens)
        expected = max(min_tokens - num_done, mean * max_tokens - num_done, spread * max_tokens)
        return min(float(max_tokens - num_done), max(1.0, expected))

    def _share(self, max_tokens: int) -> tuple[float, float]:
        """Mean and standard deviation."""
        guess = min(1.0, UNSEEN_TOKENS / max_tokens)
        shares = self._shares.get(max_tokens.bit_length())
        if shares is None:
            return guess, guess / 2
        trust = TRUST / (TRUST + shares.count)
        spread = math.sqrt(max(0.0, shares.square - shares.mean**2))
        return trust * guess + (1 - trust) * shares.mean, trust * guess / 2 + (1 - trust) * spread
