"""When an engine that has something to compute is taken for hanging. Pure but for what `Starvation` asks."""

from headrace_worker.patience import MAX_LIMIT_S, Patience
from headrace_worker.starvation import Starvation

LATE_S = 1.0
"""After so long without an iteration it is looked at what the engine waits for."""
LAP_S = 0.25
AWAY_S = 0.5
"""A time between two checks for which this process was itself not run: then the engine may not have been either."""
TOLD_MARGIN_S = 1.0
"""For the time between two Hellos: a scheduler may hear late of what was excused meanwhile."""


class HangWatch:
    def __init__(self, patience: Patience, starvation: Starvation, now: float) -> None:
        self._patience = patience
        self._starvation = starvation
        self._moved_at = now
        self._checked_at = now
        self._lap_at = now
        self._away_s = 0.0
        """Of the present lap."""
        self._excused_s = 0.0
        """Of the time since the last iteration."""

    @property
    def limit_s(self) -> float:
        """After so long without an iteration it hangs."""
        most = max(self._patience.limit_s, MAX_LIMIT_S)
        return min(self._patience.limit_s + self._excused_s, most)

    @property
    def told_limit_s(self) -> float:
        """The same for others, who hear of it now and then."""
        return self.limit_s + (TOLD_MARGIN_S if self._excused_s else 0.0)

    def hangs(self, moved_at: float, now: float) -> bool:
        """To be called many times a second. `moved_at`: when the engine last finished something, or was idle."""
        away_s, self._checked_at = now - self._checked_at, now
        if moved_at != self._moved_at:
            self._moved_at = self._lap_at = moved_at
            self._away_s = self._excused_s = 0.0
            self._starvation.reset()
        if away_s > AWAY_S:
            self._away_s += away_s
        if now - moved_at >= LATE_S and now - self._lap_at >= LAP_S:
            excused_s = max(self._starvation.lap(now), self._away_s)
            self._excused_s += min(excused_s, now - self._lap_at)
            self._lap_at, self._away_s = now, 0.0
        return now - moved_at > self.limit_s
