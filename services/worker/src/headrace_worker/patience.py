"""How long an engine may take for an iteration before it is taken for hanging. Pure.

A set time, unless the engine itself has shown to need longer: a prompt chunk of a large model takes many seconds on a
CPU, and several times that where others want the same cores.
"""

from collections import deque

FACTOR = 4.0
"""So many times the slowest of the latest iterations is no hang yet."""
NUM_REMEMBERED = 64
MAX_LIMIT_S = 300.0


class Patience:
    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._recent_s: deque[float] = deque(maxlen=NUM_REMEMBERED)

    def note(self, iteration_s: float) -> None:
        """What an iteration took. The warm-up before the first request counts as one: it computes a full chunk, and
        whatever else it costs, to compile kernels say, is forgotten with the next iterations."""
        self._recent_s.append(iteration_s)

    @property
    def limit_s(self) -> float:
        return max(self._least_s, min(FACTOR * max(self._recent_s, default=0.0), MAX_LIMIT_S))
