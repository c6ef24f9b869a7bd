"""How many workers a model should have. Pure: no bus, no clock, no environment."""

from math import ceil
from typing import NamedTuple


class Limits(NamedTuple):
    min_workers: int
    max_workers: int
    scale_down_after_s: float
    """So long must less be enough before there is less."""


class Observation(NamedTuple):
    """One model at one moment."""

    num_workers: int
    """Ready or loading; those that leave are not counted."""
    num_waiting: int
    """Requests in the queue that nobody has taken."""
    num_running: int
    """Requests taken and not yet ended."""
    worker_capacity: int
    """Sequences that one worker runs at a time; 0: not known yet."""


class State(NamedTuple):
    """What the policy remembers of a model."""

    desired: int | None = None
    """None before the first decision."""
    less_since: float | None = None
    """Since when fewer workers than `desired` would be enough."""


class Decision(NamedTuple):
    desired: int
    reason: str


def decide(observation: Observation, limits: Limits, state: State, now: float) -> tuple[Decision, State]:
    """`now` is monotonic seconds. Goes up at once, and down to what is needed after `scale_down_after_s` of less."""
    work = observation.num_waiting + observation.num_running
    if observation.worker_capacity:
        wanted = ceil(work / observation.worker_capacity)
        reason = f"{work} requests, {observation.worker_capacity} at a time on a worker"
    else:
        wanted = max(observation.num_workers, int(work > 0))
        reason = f"{work} requests, capacity of a worker not known yet"
    needed = min(max(wanted, limits.min_workers), limits.max_workers)
    if needed != wanted:
        reason += f"; {wanted} is outside {limits.min_workers} to {limits.max_workers}"
    before = max(observation.num_workers, limits.min_workers) if state.desired is None else state.desired
    current = min(before, limits.max_workers)
    if needed >= current:
        return Decision(needed, reason), State(needed)
    since = now if state.less_since is None else state.less_since
    remaining_s = since + limits.scale_down_after_s - now
    if remaining_s > 0:
        kept = f"{reason}; {needed} would be enough, waiting {remaining_s:.0f} s more"
        return Decision(current, kept), State(current, since)
    return Decision(needed, reason), State(needed)
