"""Whether another worker may be started after some have failed: later and later, then only now and then. Pure."""

from typing import NamedTuple

MIN_DELAY_S = 1.0
MAX_DELAY_S = 300.0
MAX_FAILURES = 5
"""So many in a row, and the model is in quarantine."""
QUARANTINE_S = 900.0
"""Then one more is tried."""
FULL_PAUSE_S = 3.0
"""Before it is asked again whether there is room."""
PROOF_S = 60.0
"""A worker that was ready for so long proves that workers can live."""


class Failures(NamedTuple):
    num: int = 0
    """In a row."""
    last: str = ""
    """What happened, in one line."""
    at: float = float("-inf")
    not_before: float = float("-inf")
    is_full: bool = False
    """There was no room for the last one."""

    def failed(self, what: str, now: float, *, is_hopeless: bool = False, was_ready: bool = False) -> "Failures":
        """`is_hopeless`: trying again cannot help, such as after a wrong setting. `was_ready`: workers can start, and
        something kills them: others are needed all the more, if not in a rush."""
        count = max(self.num, min(self.num + 1, MAX_FAILURES - 1)) if was_ready else self.num + 1
        count = max(count, MAX_FAILURES if is_hopeless else 0)
        delay_s = min(MAX_DELAY_S, MIN_DELAY_S * 2.0 ** min(count - 1, 16))
        return Failures(count, what, now, now + (QUARANTINE_S if count >= MAX_FAILURES else delay_s))

    def full(self, what: str, now: float) -> "Failures":
        """No room for another one: nobody's fault."""
        return self._replace(last=what, not_before=max(self.not_before, now + FULL_PAUSE_S), is_full=True)

    def roomy(self) -> "Failures":
        return self._replace(is_full=False)

    def proved(self) -> "Failures":
        return Failures() if self.num else self

    def most_starts(self, num_coming: int, wanted: int, now: float) -> int:
        """How many of the wanted workers may be started now: after a failure, or where there was no room, one at a
        time."""
        if now < self.not_before:
            return 0
        if self.is_full:
            wanted = min(wanted, 1)
        return wanted if not self.num else min(wanted, max(0, 1 - num_coming))
