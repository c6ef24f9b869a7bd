"""The policies that are compared: the autoscaler's own, and what people do without one."""

from collections import deque
from math import ceil
from typing import NamedTuple, Protocol

from headrace_autoscaler.observation import Observation
from headrace_autoscaler.policy import Limits, State, decide


class Target(NamedTuple):
    desired: int
    parked: int
    reason: str


class Scaler(Protocol):
    def decide(self, observation: Observation, now: float) -> Target:
        """Asked once a period of the autoscaler."""
        ...


class OwnPolicy:
    """The autoscaler's `decide`, unchanged."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._state = State()

    def decide(self, observation: Observation, now: float) -> Target:
        decision, self._state = decide(observation, self._limits, self._state, now)
        return Target(decision.desired, decision.parked, decision.reason)


class Fixed:
    """Always as many."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def decide(self, observation: Observation, now: float) -> Target:
        return Target(self._num_workers, 0, "fixed")


class LagThreshold:
    """What KEDA does with a queue's lag by default: the horizontal pod autoscaler divides it by the threshold every
    15 s, at most doubles (or adds four), and goes down only to the most that was wanted in the last 300 s. The lag
    counts messages that were taken and not yet acknowledged, as KEDA's scaler for JetStream does."""

    PERIOD_S = 15.0
    STABILIZATION_S = 300.0
    TOLERANCE = 0.1
    """Of the ratio of what is wanted to what is there: no change within."""

    def __init__(self, threshold: float, min_workers: int, max_workers: int) -> None:
        """`threshold`: messages for one worker."""
        self._threshold = threshold
        self._min_workers = min_workers
        self._max_workers = max_workers
        self._desired: int | None = None
        self._asked_at = float("-inf")
        self._recent: deque[tuple[float, int]] = deque()

    def decide(self, observation: Observation, now: float) -> Target:
        current = observation.num_workers if self._desired is None else self._desired
        if now - self._asked_at < self.PERIOD_S:
            return Target(current, 0, "between two looks")
        self._asked_at = now
        lag = (observation.num_waiting or 0) + (observation.num_running or 0)
        wanted = ceil(lag / self._threshold)
        if current and abs(lag / self._threshold / current - 1) <= self.TOLERANCE:
            wanted = current
        wanted = min(max(wanted, self._min_workers), self._max_workers)
        self._recent.append((now, wanted))
        while self._recent[0][0] < now - self.STABILIZATION_S:
            self._recent.popleft()
        if wanted < current:
            wanted = min(current, max(each for _, each in self._recent))
        self._desired = min(wanted, max(2 * current, current + 4))
        return Target(self._desired, 0, f"a lag of {lag}, {self._threshold:g} for each worker")
