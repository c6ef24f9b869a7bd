"""Who gets in, and when those who do not should come back. Pure, but for the jitter."""

import random
from collections.abc import Callable

from headrace_shared.errors import BusError, BusUnavailable, Overloaded, QueueFull

MAX_RETRY_AFTER_S = 120.0
"""Clients that are told more do not come back at all."""

QUEUE_DOUBT_S = 15.0
"""So long after a request could not be queued the router is not ready, unless another one could be."""
TRIAL_PERIOD_S = 2.0
"""Meanwhile one tries now and then, which may take long; nobody else waits for that."""


class QueueHealth:
    """Whether the queue takes requests. A broker may be connected and yet store nothing."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is a monotonic clock, in seconds."""
        self._now = now
        self._failed_at = self._tried_at = float("-inf")

    def succeeded(self) -> None:
        self._failed_at = float("-inf")

    def failed(self) -> None:
        self._failed_at = self._now()

    @property
    def is_doubtful(self) -> bool:
        return self._now() - self._failed_at < QUEUE_DOUBT_S

    def may_try(self) -> bool:
        """Whoever is told so does."""
        if not self.is_doubtful:
            return True
        is_due = self._now() - self._tried_at >= TRIAL_PERIOD_S
        if is_due:
            self._tried_at = self._now()
        return is_due


def retry_after(seconds: float) -> float:
    """With jitter, so that those refused together do not return together."""
    return min(MAX_RETRY_AFTER_S, seconds * random.uniform(1.0, 2.0))


def refusal(error: BusError, queue_full_status: int | None = None) -> Overloaded:
    """What a client is told when its request could not be queued."""
    if isinstance(error, QueueFull):
        return Overloaded(
            "The queue is full.", retry_after_s=retry_after(5.0), code="queue_full", status=queue_full_status
        )
    if isinstance(error, BusUnavailable):
        return Overloaded("The request queue cannot be reached.", retry_after_s=retry_after(2.0), code="unavailable")
    return Overloaded("The request could not be queued.", retry_after_s=retry_after(1.0), code="unavailable")


def no_answer() -> Overloaded:
    return Overloaded("The request queue does not answer.", retry_after_s=retry_after(2.0), code="unavailable")


def admit(num_in_flight: int, max_in_flight: int, *, is_reachable: bool) -> None:
    """Raises Overloaded. Asked before any work is done for the request. `is_reachable`: the broker is there, or has
    been away only so shortly that it may come back while we try."""
    if not is_reachable:
        raise Overloaded("The request queue cannot be reached.", retry_after_s=retry_after(2.0), code="unavailable")
    if num_in_flight >= max_in_flight:
        raise _too_many()


def admit_inputs(num_inputs: int, num_in_flight: int, max_in_flight: int) -> None:
    """Raises Overloaded. A call for embeddings may be as many requests as a thousand others: it begins only while half
    of the places are free, and if it finds room. Where nothing else is in flight it may be larger than that."""
    if num_in_flight and (2 * num_in_flight >= max_in_flight or num_in_flight + num_inputs > max_in_flight):
        raise _too_many()


def _too_many() -> Overloaded:
    return Overloaded("Too many requests are in progress.", retry_after_s=retry_after(2.0), code="queue_full")
