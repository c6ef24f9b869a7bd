"""The loop of virtual time: traffic in, a step of the cluster, and once a period a decision of the policy."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from headrace_autoscaler.observation import Observation
from headrace_shared.engine_speed import SpeedMeter, Work
from headrace_simulator.arrivals import Arrivals, Floats, Traffic
from headrace_simulator.cluster import Cluster, Load
from headrace_simulator.fleet import Times, VirtualFleet
from headrace_simulator.gates import Coming, Gate
from headrace_simulator.recorder import MINUTE_S, Recorder, Result
from headrace_simulator.scalers import Scaler
from headrace_simulator.workers import FULL, WorkerKind
from headrace_worker.timing.roofline import work_of

TTFT_WINDOW_S = 30.0
"""Over which routers report how long first tokens take."""


class Frame(NamedTuple):
    """What does not differ between the policies that are compared."""

    kind: WorkerKind
    traffic: Traffic
    step_s: float
    period_s: float
    """Of the policy."""
    times: Times
    max_workers: int
    num_first: int
    """Workers that are ready at the start."""
    target_s: float
    cost_per_worker_hour: float


def simulate(
    name: str,
    frame: Frame,
    cluster: Cluster,
    scaler: Scaler,
    gate: Gate,
    progress: Callable[[float], None] = lambda share: None,
) -> Result:
    """One run of the whole traffic. `progress` is told now and then how much of it is done."""
    begun = time.perf_counter()
    traffic, step_s = frame.traffic, frame.step_s
    fleet = VirtualFleet(frame.times, frame.max_workers, frame.num_first)
    recorder = Recorder(name, frame.target_s, traffic.weight, frame.cost_per_worker_hour)
    watch = _Watch(frame)
    decide_at = minute_at = 0.0
    for index in range(traffic.num_steps):
        now = index * step_s
        fleet.advance(now)
        load = cluster.load(now)
        if now >= decide_at:
            decide_at = now + frame.period_s
            target = scaler.decide(watch.observation(fleet, load, now), now)
            recorder.on_decision(target.desired)
            fleet.apply(target.desired, target.parked, now)
            fleet.advance(now)
        arrivals = traffic.arrivals(index)
        workers = Coming(fleet.counts.ready, fleet.coming_in_s(now))
        num_let_in = gate.admit(arrivals.num, load, workers)
        admitted = Arrivals(arrivals.prompts[:num_let_in], arrivals.answers[:num_let_in])
        step = cluster.step(now, fleet.counts.ready, admitted)
        watch.on_step(admitted.num, step.ttft_s, cluster.load(now + step_s), now)
        recorder.on_step(arrivals.num, arrivals.num - num_let_in, step.ttft_s, fleet.counts.ready, load)
        if now + step_s >= minute_at + MINUTE_S:
            minute_at += MINUTE_S
            recorder.on_minute(minute_at, fleet.counts, load)
            progress((index + 1) / traffic.num_steps)
    duration_s = traffic.num_steps * step_s
    fleet.advance(duration_s)
    return recorder.result(
        duration_s=duration_s,
        worker_s=fleet.worker_s,
        gpus_per_worker=frame.kind.roofline.num_gpus,
        cold_starts=fleet.num_cold_starts,
        promotions=fleet.num_promotions,
        wall_s=time.perf_counter() - begun,
    )


class _Watch:
    """What the autoscaler sees of the fleet."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._weight = frame.traffic.weight
        chunk = frame.kind.facts.tokens_per_iteration
        self._tokens_per_s = chunk / frame.kind.roofline.iteration_s(work_of([(0, chunk)]))
        self._num_arrived = 0
        self._meter = SpeedMeter()
        self._spent: deque[Work] = deque(maxlen=max(1, round(frame.period_s / frame.step_s)))
        self._recent: deque[tuple[float, Floats]] = deque()

    def on_step(self, num_arrived: int, ttft_s: Floats, load: Load, now: float) -> None:
        self._num_arrived += num_arrived
        self._meter.observe(load.spent, now)
        self._spent.append(load.spent)
        if len(ttft_s):
            self._recent.append((now, ttft_s))
        while self._recent and self._recent[0][0] < now - TTFT_WINDOW_S:
            self._recent.popleft()

    def _load(self) -> float | None:
        """As the autoscaler fits it to what workers report: what the last period's tokens cost with full batches."""
        speed = self._meter.speed()
        if speed is None:
            return None
        seconds = len(self._spent) * self._frame.step_s
        full_batch = FULL * self._frame.kind.facts.max_sequences
        outputs = sum(each.num_outputs for each in self._spent)
        return speed.load(outputs / seconds, sum(each.num_prompt_tokens for each in self._spent) / seconds, full_batch)

    def observation(self, fleet: VirtualFleet, load: Load, now: float) -> Observation:
        counts, weight = fleet.counts, self._weight
        recent = np.concatenate([each for _, each in self._recent]) if self._recent else None
        return Observation(
            num_ready=counts.ready,
            num_waiting=load.num_waiting * weight,
            num_running=load.num_running * weight,
            worker_capacity=self._frame.kind.facts.max_sequences,
            num_starting=counts.starting,
            num_parked=counts.parked + counts.parking,
            num_arrived=self._num_arrived * weight,
            oldest_wait_s=load.oldest_wait_s,
            num_waiting_tokens=load.num_waiting_tokens * weight,
            worker_tokens_per_s=self._tokens_per_s,
            kv_use=load.kv_use if counts.ready else None,
            batch_occupancy=load.batch_occupancy if counts.ready else None,
            gpu_utilization=load.utilization if counts.ready else None,
            load=self._load() if counts.ready else None,
            ttft_s=float(np.percentile(recent, 95)) if recent is not None else None,
            warm_up_s=self._frame.times.cold_start_s,
        )
