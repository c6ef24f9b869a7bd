"""How old a message of the queue is, whatever the hosts' clocks say.

The broker stamps messages by its own clock. We measure how far that is from our monotonic one. A step of the broker's
clock shows as a change of that distance: of what was stamped before it, nobody knows the age. Whoever starts after a
step sees none; but the broker's clock is then far from our host's, and that is taken for one.
"""

import time
from collections.abc import Callable

from headrace_shared.bus import Bus

MAX_STEP_S = 2.0
"""More than clocks drift apart, or are corrected by, between two measurements."""
MAX_APART_S = 60.0
"""More than the clocks of two hosts are apart if both are right."""


class BrokerClock:
    def __init__(
        self, bus: Bus, stream: str, clock: Callable[[], float], wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`stream`: whose messages are to be dated; `clock` is monotonic."""
        self._bus = bus
        self._stream = stream
        self._clock = clock
        self._wall_clock = wall_clock
        self._offset: float | None = None
        self._steady_since = float("-inf")

    async def measure(self) -> None:
        """Raises BusError."""
        before = self._clock()
        told = await self._bus.clock(self._stream)
        offset = told - (before + self._clock()) / 2
        if self._offset is None:
            has_stepped = abs(told - self._wall_clock()) > MAX_APART_S
        else:
            has_stepped = abs(offset - self._offset) > MAX_STEP_S
        if has_stepped:
            self._steady_since = told
        self._offset = offset

    def now(self) -> float:
        """As the broker would say; far in the past before the first measurement."""
        return self._clock() + self._offset if self._offset is not None else float("-inf")

    def age_s(self, published_at: float) -> float:
        """0 if it is not known."""
        if self._offset is None or published_at < self._steady_since:
            return 0.0
        return max(0.0, self.now() - published_at)

    async def sure_age_s(self, published_at: float) -> float:
        """After a look whether the broker's clock has made a step. Raises BusError."""
        await self.measure()
        return self.age_s(published_at)
