"""How many workers a model should have, and how many in its warm pool. Pure: no bus, no clock, no environment.

Up: at once when requests wait, else when more has been needed for a while; ahead of a rising rate of arrivals by the
time that a new worker takes to become ready; at most double in one step, since each step shows what the last one did.
Down: to the most that was needed in a long window, with a margin; after a decrease that proves wrong both
grow for some hours. A figure that cannot be read changes nothing and lowers nothing.
"""

from math import ceil, floor, inf
from typing import NamedTuple

from headrace_autoscaler.capacity import Capacity
from headrace_autoscaler.demand import Demand, Load, demand
from headrace_autoscaler.observation import Observation
from headrace_autoscaler.window import Peaks

MIN_CLEAR_S = 5.0
MAX_HORIZON_S = 600.0
STEP = 2
"""In one decision the workers at most double, or grow by so many if that is more."""
MARGIN = 0.05
"""So much more than was needed must fit before there are fewer workers."""
MIN_INCREASE = 0.03
"""Of the workers so much more must be needed before there are more, while nothing waits."""
DECREASE = 0.1
"""Of the workers at most this share goes at a time, or one,"""
DECREASE_PAUSE_S = 60.0
"""and then none for this time."""
REVERSAL_S = 3600.0
"""More workers within this time after fewer: fewer was wrong."""
PATIENCE = 3.0
"""Factor by which the window is longer after fewer was wrong, until that is forgiven."""
SLACK = 0.5
"""Of a worker: so much more must fit after each time that fewer was wrong."""
MAX_REVERSALS = 3
FORGIVEN_S = 2 * REVERSAL_S
CHANCE = 1e-6
"""Below this a fraction of a worker is an error of rounding."""


class Limits(NamedTuple):
    min_workers: int = 1
    max_workers: int = 8
    scale_down_after_s: float = 300.0
    """So long must less be enough before there is less."""
    scale_up_after_s: float = 20.0
    """So long must more be needed before there is more, while nothing waits."""
    scale_to_zero_after_s: float = 900.0
    """Without any request for so long the last worker goes, if `min_workers` is 0."""
    ttft_target_s: float = 2.0
    """Wanted time to first token."""
    target_load: float = 0.9
    """Share of a worker's capacity that is planned with."""
    min_parked: int = 0
    max_parked: int = 0
    """Of the warm pool. 0: there is none."""
    cost_per_worker_hour: float = 0.0
    max_cost_per_hour: float = 0.0
    """0: no limit."""

    @property
    def most_workers(self) -> int:
        """Within `max_workers` and the cost."""
        if self.max_cost_per_hour > 0 and self.cost_per_worker_hour > 0:
            return min(self.max_workers, floor(self.max_cost_per_hour / self.cost_per_worker_hour + CHANCE))
        return self.max_workers


class State(NamedTuple):
    """What the policy remembers of a model."""

    desired: int | None = None
    """None before the first decision."""
    load: Load = Load()
    capacity: Capacity = Capacity()
    needed: Peaks = Peaks()
    """Workers, as fractions."""
    more_since: float | None = None
    """Since when more than `desired` has been needed."""
    worked_at: float | None = None
    """When there was last anything to do."""
    decreased_at: float = -inf
    reversed_at: float = -inf
    num_reversals: int = 0
    """How often fewer proved wrong, until that is forgiven."""


class Decision(NamedTuple):
    desired: int
    """Workers that serve or are on their way."""
    reason: str
    """One line."""
    parked: int = 0
    """Workers wanted in the warm pool, beside the others."""
    is_frozen: bool = False
    """Something could not be read: nothing may be decreased."""
    cost_per_hour: float = 0.0


def decide(observation: Observation, limits: Limits, state: State, now: float) -> tuple[Decision, State]:
    """`now` is monotonic seconds."""
    before = state.desired if state.desired is not None else observation.num_workers
    current = min(max(before, limits.min_workers), limits.most_workers)
    if observation.num_waiting is None or observation.num_running is None:
        kept = max(current, before)
        frozen = Decision(kept, "the queue cannot be read: nothing changes", observation.num_parked, True)
        return _priced(frozen, limits), state._replace(desired=kept, needed=Peaks(), more_since=None, load=Load())
    load = state.load.after(observation, now)
    capacity = state.capacity.after(observation, limits.ttft_target_s, now)
    has_work = _has_work(observation, state)
    worked_at = now if has_work or state.worked_at is None else state.worked_at
    state = state._replace(load=load, capacity=capacity, worked_at=worked_at)
    horizon_s = min(observation.warm_up_s, MAX_HORIZON_S)
    clear_s = max(MIN_CLEAR_S, limits.ttft_target_s + (0.0 if observation.num_parked else horizon_s))
    places = capacity.sequences(observation.worker_capacity)
    work = demand(observation, load, places, clear_s, horizon_s) if places else None
    needed, reason = _needed(observation, load, work, places, limits, clear_s, current)
    least = max(limits.min_workers, _least(observation, state, limits, now))
    decision, state = _step(observation, limits, state, now, current, needed, least)
    parked = _parked(limits, decision.desired, work, has_work)
    decision = decision._replace(reason=f"{reason}; {decision.reason}", parked=parked)
    return _priced(decision, limits), state


def _has_work(observation: Observation, state: State) -> bool:
    counted, arrived = state.load.trend.counted, observation.num_arrived
    came = counted is not None and arrived is not None and arrived > counted
    return bool(observation.num_waiting or observation.num_running or came)


def _least(observation: Observation, state: State, limits: Limits, now: float) -> int:
    """The last worker stays while there is work, and for a while after."""
    assert state.worked_at is not None
    is_awake = bool(state.desired or observation.num_workers)
    has_work = bool(observation.num_waiting or observation.num_running)
    return int(has_work or (is_awake and now - state.worked_at < limits.scale_to_zero_after_s))


def _needed(
    observation: Observation,
    load: Load,
    work: Demand | None,
    places: float,
    limits: Limits,
    clear_s: float,
    current: int,
) -> tuple[float, str]:
    """Workers, as a fraction, and why."""
    if work is None:
        num_waiting, num_running = observation.num_waiting or 0, observation.num_running or 0
        text = f"{num_running} running, {num_waiting} waiting, capacity of a worker not known yet"
        return float(max(current, bool(num_waiting or num_running))), text
    needed = work.workers / limits.target_load
    text = f"{work.text}, {places * limits.target_load:.3g} at a time on a worker"
    if observation.num_waiting_tokens and observation.worker_tokens_per_s > 0:
        tokens = observation.num_waiting_tokens
        busy = load.mean_running if load.in_workers else (observation.num_running or 0) / places
        by_tokens = busy / limits.target_load + tokens / (observation.worker_tokens_per_s * clear_s)
        if by_tokens > needed:
            needed, text = by_tokens, f"{tokens} prompt tokens waiting, {text}"
    return needed, text


def _step(
    observation: Observation, limits: Limits, state: State, now: float, current: int, needed: float, least: int
) -> tuple[Decision, State]:
    wanted = max(ceil(needed - CHANCE), least)
    is_late = observation.oldest_wait_s > limits.ttft_target_s
    all_serve = not observation.num_starting and observation.num_ready >= current
    if is_late and observation.num_waiting and all_serve and wanted <= current:
        wanted = current + 1
        needed = max(needed, wanted / (1 + MARGIN))  # remembered, or the next decision would take it back
    if now - state.reversed_at >= FORGIVEN_S:
        state = state._replace(num_reversals=0)
    window_s = limits.scale_down_after_s * (PATIENCE if state.num_reversals else 1.0)
    peaks = state.needed.after(needed, now, window_s)
    bounded = min(wanted, limits.most_workers)
    is_chance = not observation.num_waiting and wanted <= current * (1 + MIN_INCREASE)
    if bounded > current and not is_chance:
        return _increase(observation, limits, state._replace(needed=peaks), now, current, bounded, wanted)
    state = state._replace(needed=peaks, more_since=None)
    highest = peaks.highest(now, window_s)
    room = SLACK * state.num_reversals if least else 0.0
    enough = current if highest is None else max(ceil(highest * (1 + MARGIN) + room - CHANCE), least)
    # What is left is seen at its new size before there is less again: it has to take over what the others ran.
    is_soon = now - state.decreased_at < min(DECREASE_PAUSE_S, limits.scale_down_after_s)
    # Nor while requests wait for what was just started: that it is enough shows once it is there.
    if is_soon or _will_be_late(observation, state.load, limits.ttft_target_s / 2):
        enough = current
    enough = max(enough, current - max(1, floor(current * DECREASE)))
    if enough < current:
        decision = Decision(enough, f"{current} -> {enough}: less was enough for {window_s:.0f} s")
        return decision, state._replace(desired=enough, decreased_at=now)
    text = f"stays {current}"
    if bounded < wanted:
        text += f" of {wanted}, the most allowed"
    elif wanted < current:
        left_s = peaks.covered_in_s(now, window_s)
        text += f", {wanted} would do, waiting {left_s:.0f} s more" if left_s else f", near {current}"
    return Decision(current, text), state._replace(desired=current)


def _increase(
    observation: Observation, limits: Limits, state: State, now: float, current: int, bounded: int, wanted: int
) -> tuple[Decision, State]:
    since = now if state.more_since is None else state.more_since
    is_urgent = _will_be_late(observation, state.load, limits.ttft_target_s / 2) or not current
    left_s = since + limits.scale_up_after_s - now
    if not is_urgent and left_s > 0:
        text = f"stays {current}, {bounded} wanted, waiting {left_s:.0f} s more"
        return Decision(current, text), state._replace(desired=current, more_since=since)
    desired = min(bounded, max(STEP * current, current + STEP))
    if now - state.decreased_at < REVERSAL_S:
        num_reversals = min(MAX_REVERSALS, state.num_reversals + 1)
        state = state._replace(num_reversals=num_reversals, reversed_at=now, decreased_at=-inf)
    limit = f" of {wanted}" if desired < wanted else ""
    return Decision(desired, f"{current} -> {desired}{limit}"), state._replace(desired=desired, more_since=None)


def _will_be_late(observation: Observation, load: Load, tolerated_s: float) -> bool:
    """A short queue that the next endings clear is chance, and no reason to hurry."""
    if not observation.num_waiting:
        return False
    is_moving = load.duration_s is not None and observation.num_waiting <= load.ended_per_s * tolerated_s
    return not is_moving or observation.oldest_wait_s > tolerated_s


def _parked(limits: Limits, desired: int, work: Demand | None, has_work: bool) -> int:
    """Enough for what the trend will bring while a new worker loads, and one for what nobody foresees."""
    ahead = ceil(work.ahead / limits.target_load - CHANCE) if work is not None else 0
    wanted = ahead + int(has_work)
    room = max(0, limits.most_workers - desired)
    return min(max(wanted, limits.min_parked), limits.max_parked, room)


def _priced(decision: Decision, limits: Limits) -> Decision:
    return decision._replace(cost_per_hour=(decision.desired + decision.parked) * limits.cost_per_worker_hour)
