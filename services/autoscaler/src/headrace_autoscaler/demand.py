"""How much work there is: in workers that would be fully used, or else in sequences that should run at a time. Pure.

By Little's law (Little, 1961) as much is done on average as comes in times what one request takes. What it takes is
measured the same way, from what is done and the requests that end, so that nobody has to report it. Where the workers'
load is known, that is the time of a fully used worker, and does not depend on the load. Else it is the time of a
sequence, which does: many sequences slow each other down. What waits is to be worked off within `clear_s`. Never is
more wanted than would let everything run at once.
"""

from math import exp
from typing import NamedTuple

from headrace_autoscaler.observation import Observation
from headrace_autoscaler.trend import MAX_GAP_S, Trend

SMOOTHING_S = 60.0
MIN_ENDED = 3.0
"""Requests that must have ended in the time of the average, before their duration is known."""


class Load(NamedTuple):
    """What is remembered of the work of a model."""

    trend: Trend = Trend()
    in_workers: bool = False
    """Whether what runs is counted in fully used workers, or in sequences."""
    running: float = 0.0
    """Moving averages of equal age, from zero: only ratios of them are meaningful while they are young."""
    ended_per_s: float = 0.0
    weight: float = 0.0
    num_in_system: int | None = None
    at: float = 0.0

    def after(self, observation: Observation, now: float) -> "Load":
        """`num_waiting` and `num_running` are known."""
        num_in_system = (observation.num_waiting or 0) + (observation.num_running or 0)
        arrived = observation.num_arrived
        trend = self.trend.after(arrived, now) if arrived is not None else self.trend
        elapsed_s = now - self.at
        in_workers = observation.load is not None
        fresh = self.num_in_system is None or elapsed_s > MAX_GAP_S or in_workers is not self.in_workers
        if fresh or arrived is None or self.trend.counted is None or arrived < self.trend.counted:
            return Load(trend, in_workers, num_in_system=num_in_system, at=now)
        if elapsed_s <= 0:
            return self
        assert self.num_in_system is not None
        num_ended = max(0, arrived - self.trend.counted - (num_in_system - self.num_in_system))
        part = 1 - exp(-elapsed_s / SMOOTHING_S)
        running = observation.num_running or 0 if observation.load is None else observation.load * observation.num_ready
        return Load(
            trend,
            in_workers,
            self.running + (running - self.running) * part,
            self.ended_per_s + (num_ended / elapsed_s - self.ended_per_s) * part,
            self.weight + (1 - self.weight) * part,
            num_in_system,
            now,
        )

    @property
    def duration_s(self) -> float | None:
        """That a request takes of a sequence's place, or of a fully used worker; None while too few have ended to
        know."""
        if self.ended_per_s * SMOOTHING_S < MIN_ENDED:
            return None
        return self.running / self.ended_per_s

    @property
    def mean_running(self) -> float:
        return self.running / self.weight if self.weight else 0.0


class Demand(NamedTuple):
    workers: float
    """That would be fully used."""
    ahead: float
    """How many more would be wanted after one more warm-up, if the trend goes on."""
    text: str


def demand(observation: Observation, load: Load, places: float, clear_s: float, horizon_s: float) -> Demand:
    """`places`: sequences that fully use a worker. `horizon_s`: how far ahead to look, the time in which a new worker
    becomes ready."""
    num_waiting, num_running = observation.num_waiting or 0, observation.num_running or 0
    num_in_system = num_waiting + num_running
    duration_s = load.duration_s
    if duration_s is None:
        return Demand(num_in_system / places, 0.0, f"{num_in_system} requests ({num_waiting} waiting)")
    unit = 1.0 if load.in_workers else places
    rate, expected = load.trend.rate, load.trend.forecast(horizon_s)
    growth = expected / rate if rate > 0 else 1.0
    by_rate = duration_s * (expected + num_waiting / clear_s) / unit
    if not num_waiting:
        by_rate = max(by_rate, load.mean_running / unit * growth)
    mean, present = load.mean_running / unit, num_in_system / places
    if observation.load is not None and num_in_system:
        present = max(present, observation.load * observation.num_ready)
    # Less than half of the average is no chance: the load is gone, and only the average still knows it.
    most = growth * (present if 2 * present < mean else max(present, mean))
    ahead = duration_s * max(0.0, load.trend.forecast(2 * horizon_s) - expected) / unit
    trend = f" rising to {expected:.2g}/s" if growth > 1.01 else ""
    took = f"{duration_s:.2g} worker seconds" if load.in_workers else f"{duration_s:.2g} s"
    text = f"{rate:.2g}/s{trend} of {took}, {num_running} running, {num_waiting} waiting"
    return Demand(min(by_rate, most), ahead, text)
