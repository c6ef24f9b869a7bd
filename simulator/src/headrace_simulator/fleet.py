"""The workers that an autoscaler has in virtual time: starting, ready, parked, leaving, and what they cost."""

from typing import NamedTuple


class Times(NamedTuple):
    """How long things take, in seconds."""

    cold_start_s: float
    """Container, weights, graphs: until a new worker is ready or parked."""
    promotion_s: float
    """Until a parked worker is ready."""
    drain_s: float
    """Until a worker that is to go has handed its sequences over and its GPU is free."""


class Counts(NamedTuple):
    ready: int
    starting: int
    """On their way to be ready, promotions too."""
    parked: int
    parking: int
    """On their way into the warm pool."""
    leaving: int

    @property
    def total(self) -> int:
        """Workers whose GPUs are taken."""
        return sum(self)


class VirtualFleet:
    """`apply` does what a driver would for a decision; `advance` lets time pass."""

    def __init__(self, times: Times, max_workers: int, num_ready: int) -> None:
        self._times = times
        self._max_workers = max_workers
        self._ready = num_ready
        self._parked = 0
        self._starting: list[float] = []
        """When each will be there, soonest first; the next two likewise."""
        self._parking: list[float] = []
        self._leaving: list[float] = []
        self.worker_s = 0.0
        """Time of all workers so far, whatever they did: what is paid for."""
        self.num_cold_starts = 0
        self.num_promotions = 0
        self._at = 0.0

    @property
    def counts(self) -> Counts:
        return Counts(self._ready, len(self._starting), self._parked, len(self._parking), len(self._leaving))

    def coming_in_s(self, now: float) -> tuple[float, ...]:
        """Seconds until each of those that start is ready."""
        return tuple(at - now for at in self._starting)

    def advance(self, now: float) -> None:
        self.worker_s += self.counts.total * (now - self._at)
        self._at = now
        num_started = sum(at <= now for at in self._starting)
        num_parked = sum(at <= now for at in self._parking)
        self._ready += num_started
        self._parked += num_parked
        del self._starting[:num_started], self._parking[:num_parked]
        self._leaving = [at for at in self._leaving if at > now]

    def apply(self, desired: int, parked: int, now: float) -> None:
        """Workers wanted ready or on their way, and in the warm pool beside them."""
        missing = desired - self._ready - len(self._starting)
        if missing > 0:
            self._increase(missing, now)
        elif missing < 0:
            self._decrease(-missing, parked, now)
        self._fill_pool(parked, now)

    def _increase(self, missing: int, now: float) -> None:
        promoted = min(missing, self._parked)
        self._parked -= promoted
        self.num_promotions += promoted
        self._starting += [now + self._times.promotion_s] * promoted
        missing -= promoted
        # A worker that loads for the pool becomes a serving one instead.
        redirected, self._parking = self._parking[:missing], self._parking[missing:]
        self._starting += redirected
        missing = min(missing - len(redirected), self._max_workers - self.counts.total)
        if missing > 0:
            self.num_cold_starts += missing
            self._starting += [now + self._times.cold_start_s] * missing
        self._starting.sort()

    def _decrease(self, surplus: int, parked: int, now: float) -> None:
        """What is not ready yet goes first, latest first; then ready ones, into the pool as far as it has need."""
        cancelled = min(surplus, len(self._starting))
        del self._starting[len(self._starting) - cancelled :]
        surplus -= cancelled
        self._ready -= surplus
        kept = max(0, min(surplus, parked - self._parked - len(self._parking)))
        self._parking = sorted([*self._parking, *[now + self._times.drain_s] * kept])
        self._leaving += [now + self._times.drain_s] * (surplus - kept)

    def _fill_pool(self, parked: int, now: float) -> None:
        missing = parked - self._parked - len(self._parking)
        if missing > 0:
            missing = max(0, min(missing, self._max_workers - self.counts.total))
            self.num_cold_starts += missing
            self._parking = sorted([*self._parking, *[now + self._times.cold_start_s] * missing])
        elif missing < 0:
            cancelled = min(-missing, len(self._parking))
            del self._parking[len(self._parking) - cancelled :]
            self._parked = max(0, self._parked - (-missing - cancelled))
