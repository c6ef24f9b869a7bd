"""Whether what others say could be heard all the time: silence means something only then."""

from headrace_shared.bus import Bus

FREEZE_S = 2.0
"""Without a look for so long we were not running, and heard nobody."""


class Hearing:
    def __init__(self, bus: Bus, now: float) -> None:
        """To be looked at several times in FREEZE_S."""
        self._bus = bus
        self._looked_at = now

    def had_gap(self, now: float) -> bool:
        """Since the last look; also as long as the broker is away."""
        frozen_s, self._looked_at = now - self._looked_at, now
        return frozen_s > FREEZE_S or not self._bus.is_connected
