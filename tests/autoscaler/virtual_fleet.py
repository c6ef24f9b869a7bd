"""A fleet in virtual time under the policy: requests wait, run on any free place, and end. For tests of the policy."""

import heapq
import random
from collections import deque
from collections.abc import Callable
from math import exp
from typing import NamedTuple

from headrace_autoscaler.observation import Observation
from headrace_autoscaler.policy import Decision, Limits, State, decide

TICK_S = 0.1


class Change(NamedTuple):
    at: float
    desired: int
    reason: str


class Run(NamedTuple):
    changes: list[Change]
    waits: list[float]
    worker_s: float
    """Time paid for, of all workers."""
    num_left: int
    """Requests that have not begun."""

    def desired_at(self, at: float) -> int:
        return [change.desired for change in self.changes if change.at <= at][-1]

    def share_within(self, seconds: float) -> float:
        return sum(wait <= seconds for wait in self.waits) / len(self.waits)


def simulate(
    rate: Callable[[float], float],
    duration: Callable[[random.Random], float],
    *,
    limits: Limits,
    seconds: float,
    capacity: int = 10,
    warm_up_s: float = 30.0,
    period_s: float = 5.0,
    num_ready: int = 1,
    is_random: bool = True,
    observe: Callable[[float, Observation], Observation] = lambda _, observation: observation,
) -> Run:
    """`rate`: requests a second at a time, by chance or evenly. `observe` may spoil what the policy sees."""
    source = random.Random(1)
    state, decision = State(), Decision(num_ready, "")
    starting: deque[float] = deque()
    waiting: deque[float] = deque()
    running: list[float] = []
    changes: list[Change] = []
    waits: list[float] = []
    num_arrived, due, worker_s, next_at = 0, 0.0, 0.0, 0.0
    for tick in range(int(seconds / TICK_S)):
        now = tick * TICK_S
        due += rate(now) * TICK_S
        num_new = _poisson(source, rate(now) * TICK_S) if is_random else int(due) - num_arrived
        num_arrived += num_new
        waiting.extend([now] * num_new)
        while running and running[0] <= now:
            heapq.heappop(running)
        while starting and starting[0] <= now:
            starting.popleft()
            num_ready += 1
        while waiting and len(running) < num_ready * capacity:
            waits.append(now - waiting.popleft())
            heapq.heappush(running, now + duration(source))
        worker_s += (num_ready + len(starting)) * TICK_S
        if now >= next_at:
            next_at += period_s
            seen = Observation(
                num_ready=num_ready,
                num_starting=len(starting),
                num_waiting=len(waiting),
                num_running=len(running),
                num_arrived=num_arrived,
                worker_capacity=capacity,
                oldest_wait_s=now - waiting[0] if waiting else 0.0,
                warm_up_s=warm_up_s,
            )
            decision, state = decide(observe(now, seen), limits, state, now)
            if not changes or changes[-1].desired != decision.desired:
                changes.append(Change(now, decision.desired, decision.reason))
            while num_ready + len(starting) < decision.desired:
                starting.append(now + warm_up_s)
            while num_ready + len(starting) > decision.desired:
                if starting:
                    starting.pop()
                else:
                    num_ready -= 1
    return Run(changes, waits, worker_s, len(waiting))


def _poisson(source: random.Random, mean: float) -> int:
    limit, product, count = exp(-mean), source.random(), 0
    while product > limit:
        product *= source.random()
        count += 1
    return count
