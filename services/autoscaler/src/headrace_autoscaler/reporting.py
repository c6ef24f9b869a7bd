"""The autoscaler's figures: gauges of Telemetry, which routers and people read, and Prometheus metrics."""

from collections.abc import Iterable

from headrace_autoscaler.control import Control
from headrace_autoscaler.performing import ACTIONS
from headrace_shared.telemetry import (
    COMING_IN_S_OF,
    COMING_WORKERS_OF,
    MAX_WORKERS_OF,
    START_S_OF,
    Instrument,
    Metrics,
    of_model,
)

IS_LEADER = "is_leader"
DESIRED_WORKERS_OF = "desired_workers"
PARKED_WORKERS_OF = "parked_workers"
DESIRED_PARKED_OF = "desired_parked"
NUM_FAILURES_OF = "num_failures"
"""Starts in a row that came to nothing."""
COST_PER_HOUR_OF = "cost_per_hour"
MIN_COMING_IN_S = 0.5
"""Nobody knows better, once the expected time is up."""

REPLICAS = Instrument("gauge", "headrace_autoscaler_replicas", "Workers, by where they stand.", ("model", "state"))
TARGET_REPLICAS = Instrument("gauge", "headrace_autoscaler_target_replicas", "Workers wanted.", ("model",))
LEADER = Instrument("gauge", "headrace_autoscaler_is_leader", "1 if this one acts.")
FAILED_STARTS = Instrument(
    "gauge", "headrace_autoscaler_failures", "Workers in a row that could not be started or did not live.", ("model",)
)
COST = Instrument("gauge", "headrace_autoscaler_cost_per_hour", "Of the workers wanted, as configured.", ("model",))


class Reporting:
    def __init__(self, metrics: Metrics, max_workers: int) -> None:
        self._max_workers = max_workers
        self._replicas = metrics.gauge(REPLICAS)
        self._target = metrics.gauge(TARGET_REPLICAS)
        self._leader = metrics.gauge(LEADER)
        self._failures = metrics.gauge(FAILED_STARTS)
        self._cost = metrics.gauge(COST)
        metrics.counter(ACTIONS)  # there from the start, also where nothing acts

    def gauges(self, controls: Iterable[Control], now: float, *, can_act: bool) -> dict[str, float]:
        """Of a leader. Unless it `can_act`, nobody may count on workers that it says are coming."""
        self._leader.set(1)
        gauges = {IS_LEADER: 1.0}
        for control in controls:
            if control.decision is None:
                continue
            model, counts, decision = control.model, control.counts, control.decision
            own = {
                DESIRED_WORKERS_OF: decision.desired,
                DESIRED_PARKED_OF: decision.parked,
                PARKED_WORKERS_OF: counts.parked,
                NUM_FAILURES_OF: control.reconciler.failures.num,
                COST_PER_HOUR_OF: decision.cost_per_hour,
            }
            if can_act:
                own[MAX_WORKERS_OF] = self._max_workers
                own[COMING_WORKERS_OF] = counts.coming
                own[START_S_OF] = control.start_s
                if counts.coming:
                    first = min(counts.coming_since, default=now)
                    own[COMING_IN_S_OF] = max(MIN_COMING_IN_S, first + control.warm_up_s - now)
            gauges |= {of_model(name, model): float(value) for name, value in own.items()}
            self._set_metrics(control)
        return gauges

    def follower(self) -> dict[str, float]:
        self._leader.set(0)
        for gauge in (self._replicas, self._target, self._failures, self._cost):
            gauge.clear()
        return {IS_LEADER: 0.0}

    def _set_metrics(self, control: Control) -> None:
        model, counts, decision = control.model, control.counts, control.decision
        assert decision is not None
        for state in ("ready", "coming", "parked", "parking", "leaving"):
            self._replicas.labels(model, state).set(getattr(counts, state))
        self._target.labels(model).set(decision.desired)
        self._failures.labels(model).set(control.reconciler.failures.num)
        self._cost.labels(model).set(decision.cost_per_hour)
