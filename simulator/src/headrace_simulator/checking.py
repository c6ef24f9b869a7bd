"""The two models of a fleet side by side: the same steady load, once request by request and once token by token."""

from typing import NamedTuple

import numpy as np

from headrace_simulator.arrivals import Floats
from headrace_simulator.cluster import Cluster
from headrace_simulator.diurnal import MAX_ANSWER, MEAN_ANSWER, MEAN_PROMPT, Day
from headrace_simulator.mean_field import MeanField
from headrace_simulator.token_level import TokenLevel
from headrace_simulator.workers import WorkerKind

LOADS = (0.3, 0.6, 0.85)
"""Of a worker's capacity."""
WARM_UP_SHARE = 0.4
"""Of the time, until the number of running sequences is what it stays."""
STEP_S = 0.25


class Measured(NamedTuple):
    ttft_p50_s: float
    ttft_p99_s: float
    num_running: float
    """Sequences on one worker, on average."""
    finished_per_s: float


class Comparison(NamedTuple):
    load: float
    requests: Measured
    tokens: Measured


def compare(kind: WorkerKind, num_workers: int, seconds: float, seed: int, load: float) -> Comparison:
    rate = load * num_workers * kind.capacity(MEAN_PROMPT, MEAN_ANSWER)
    day = Day(rate, step_s=STEP_S, duration_s=seconds, seed=seed, steady=True, max_per_step=1 << 30)
    requests = MeanField(kind, step_s=STEP_S, weight=1, max_answer=MAX_ANSWER, seed=seed)
    tokens = TokenLevel(kind, step_s=STEP_S, seed=seed)
    return Comparison(load, _run(requests, day, num_workers), _run(tokens, day, num_workers))


def _run(cluster: Cluster, day: Day, num_workers: int) -> Measured:
    ttft_s: list[Floats] = []
    running: list[int] = []
    num_finished = 0
    first = int(WARM_UP_SHARE * day.num_steps)
    for index in range(day.num_steps):
        step = cluster.step(index * STEP_S, num_workers, day.arrivals(index))
        if index >= first:
            ttft_s.append(step.ttft_s)
            running.append(cluster.load((index + 1) * STEP_S).num_running)
            num_finished += step.num_finished
    times = np.concatenate(ttft_s)
    p50, p99 = np.percentile(times, (50, 99))
    measured_s = (day.num_steps - first) * STEP_S
    return Measured(float(p50), float(p99), float(np.mean(running)) / num_workers, num_finished / measured_s)


def make_table(comparisons: list[Comparison]) -> str:
    lines = ["load   TTFT p50 (tokens / requests)   p99               running a worker   finished/s"]
    for load, requests, tokens in comparisons:
        pairs = [
            f"{tokens.ttft_p50_s:.3f} / {requests.ttft_p50_s:.3f} s".ljust(33),
            f"{tokens.ttft_p99_s:.3f} / {requests.ttft_p99_s:.3f}".ljust(18),
            f"{tokens.num_running:.0f} / {requests.num_running:.0f}".ljust(19),
            f"{tokens.finished_per_s:.1f} / {requests.finished_per_s:.1f}",
        ]
        lines.append(f"{load:<7.2f}" + "".join(pairs))
    return "\n".join(lines) + "\n"
