"""When a generation has to look into the token log, when it has to ask whether its request is still there, and when it
has waited too long. Pure; times are the loop's."""

NEVER = float("inf")
LOOK_DELAYS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0)
"""Before each look into the log for what is missing."""
LOOK_AFTER_S = 5.0
"""A silence of this length is looked into once: the last frames may have been lost."""


class Watchdog:
    __slots__ = (
        "_deadline",
        "_last_event_at",
        "_looked_after",
        "_num_looks",
        "_stall_timeout_s",
        "is_running",
        "look_at",
    )

    def __init__(self, now: float, request_timeout_s: float, stall_timeout_s: float) -> None:
        self._deadline = now + request_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._last_event_at = now
        self._looked_after = now
        self._num_looks = 0
        self.look_at = NEVER
        """When to look into the log next."""
        self.is_running = False
        """Something has started and is not complete. Waiting in the queue is no stall."""

    def on_event(self, now: float) -> None:
        self._last_event_at = now

    def look_in(self, delay_s: float, now: float) -> None:
        """Something may have been missed."""
        self.look_at = now + delay_s
        self._num_looks = 0

    def on_gap(self, now: float) -> None:
        """Something has been missed."""
        if self.look_at == NEVER:
            self.look_in(LOOK_DELAYS_S[0], now)

    def on_look(self, now: float, *, found_all: bool) -> bool:
        """After a look. False: there have been enough of them."""
        self._num_looks += 1
        self.look_at = NEVER
        if found_all:
            return True
        if self._num_looks >= len(LOOK_DELAYS_S):
            return False
        self.look_at = now + LOOK_DELAYS_S[self._num_looks]
        return True

    def on_failed_look(self, now: float) -> None:
        """The log could not be read."""
        self.look_at = now + LOOK_DELAYS_S[-1]

    def check(self, now: float) -> bool:
        """Whether the time is up."""
        if now >= self._silence_at():
            self._looked_after = self._last_event_at
            self.look_at = now
        return now >= self._deadline

    def is_stalled(self, now: float) -> bool:
        """Something that has started is silent for so long that its request may be lost; the next event, or
        `on_event`, ends that."""
        return now >= self._stalled_at()

    def next_alarm(self) -> float:
        """When to check again if nothing happens."""
        return min(self._deadline, self._stalled_at(), self._silence_at(), self.look_at)

    def _stalled_at(self) -> float:
        if not self.is_running or self.look_at != NEVER:  # first the look
            return NEVER
        return self._last_event_at + self._stall_timeout_s

    def _silence_at(self) -> float:
        if not self.is_running or self._looked_after == self._last_event_at or self.look_at != NEVER:
            return NEVER
        return self._last_event_at + LOOK_AFTER_S
