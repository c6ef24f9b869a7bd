"""How many sequences at a time one worker is good for: its places, its KV memory, and what it can do in time. Pure.

A worker's own limit says how many sequences take part in an iteration. Fewer may fill its memory, and fewer still may
be too many for the time to first token that is wanted, on a CPU say: then the load at which it was missed is
remembered, and slowly forgotten.
"""

from math import exp
from typing import NamedTuple

from headrace_autoscaler.observation import Observation

SMOOTHING_S = 120.0
MIN_KV_USE = 0.3
"""Less says nothing about how many sequences would fill it."""
BUSY_GPU = 0.8
"""Below this it is not the GPU that makes first tokens late, and more of them would not help."""
RETREAT = 0.9
"""Of the load at which the target was missed."""
RETREAT_PAUSE_S = 60.0
"""What a retreat changes shows only later. And when nothing waits any more, late first tokens are for a while still
those of requests that waited."""
FORGET_S = 6 * 3600.0
"""The learnt limit grows by a factor of e in this time."""


class Capacity(NamedTuple):
    by_memory: float | None = None
    by_target: float | None = None
    retreated_at: float = float("-inf")
    at: float | None = None
    calm_since: float | None = None
    """Since when nothing has waited for a worker, and none has been on its way."""

    def after(self, observation: Observation, ttft_target_s: float, now: float) -> "Capacity":
        elapsed_s = 0.0 if self.at is None else max(0.0, now - self.at)
        learnt = self.by_target
        if learnt is not None:
            grown = learnt * exp(elapsed_s / FORGET_S)
            learnt = None if grown >= observation.worker_capacity > 0 else grown
        by_memory = _by_memory(observation, self.by_memory, elapsed_s)
        retreated_at = self.retreated_at
        is_calm = not observation.num_waiting and not observation.num_starting
        calm_since = (now if self.calm_since is None else self.calm_since) if is_calm else None
        has_rest = calm_since is not None and now - max(calm_since, retreated_at) >= RETREAT_PAUSE_S
        if has_rest and _is_late(observation, ttft_target_s):
            load = (observation.num_running or 0) / observation.num_ready
            learnt, retreated_at = max(1.0, RETREAT * min(load, learnt or load)), now
        return Capacity(by_memory, learnt, retreated_at, now, calm_since)

    def sequences(self, worker_capacity: int) -> float:
        """At least 1, if `worker_capacity` is known; else 0."""
        if not worker_capacity:
            return 0.0
        limits = [limit for limit in (self.by_memory, self.by_target) if limit is not None]
        return max(1.0, min([float(worker_capacity), *limits]))


def _by_memory(observation: Observation, before: float | None, elapsed_s: float) -> float | None:
    use, occupancy = observation.kv_use, observation.batch_occupancy
    if use is None or occupancy is None or not observation.worker_capacity or use < max(MIN_KV_USE, occupancy):
        return before
    now = occupancy * observation.worker_capacity / use
    return now if before is None else before + (now - before) * (1 - exp(-elapsed_s / SMOOTHING_S))


def _is_late(observation: Observation, ttft_target_s: float) -> bool:
    """Where nothing waits for a worker, it is because the workers do too much at a time."""
    is_busy = observation.gpu_utilization is None or observation.gpu_utilization >= BUSY_GPU
    late = observation.ttft_s is not None and observation.ttft_s > ttft_target_s
    return late and is_busy and observation.num_ready > 0 and bool(observation.num_running)
