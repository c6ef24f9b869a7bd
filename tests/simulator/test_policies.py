"""What the autoscaler's policy is worth on a thousand GPUs."""

from typing import Any

from headrace_simulator.plan import make_cluster, make_gate, make_plan, make_scaler
from headrace_simulator.recorder import Result
from headrace_simulator.settings import SimulateSettings
from headrace_simulator.simulation import simulate


def run(policy: str, **settings: Any) -> Result:
    made = SimulateSettings(gpus=1000, step_s=2.0, max_requests_per_step=100, **settings)
    plan = make_plan(made)
    scaler, num_first = make_scaler(made, plan, policy)
    frame = plan.frame._replace(num_first=num_first)
    return simulate(policy, frame, make_cluster(made, plan), scaler, make_gate(made, plan))


def test_a_working_day_costs_far_less_than_its_peak_and_first_tokens_come_in_time() -> None:
    """Of the whole day only the hours in which the load rises most, and some of the night."""
    settings = SimulateSettings(gpus=1000, step_s=2.0, max_requests_per_step=100)
    peak = make_scaler(settings, make_plan(settings), "fixed-peak")[1]
    own = run("own", start_hour=6.0, hours=4.0)
    assert own.within_target > 0.99 and own.num_shed == 0
    assert own.mean_workers < 0.6 * peak
    night = run("own", start_hour=1.0, hours=1.0)
    assert night.within_target > 0.99 and night.mean_workers < 0.35 * peak


def test_a_steady_load_brings_hardly_any_change() -> None:
    steady = run("own", steady=True, peak=0.6, hours=2.0)
    assert steady.within_target > 0.99
    assert steady.changes_per_hour <= 2


def test_a_warm_pool_saves_a_surge_that_comes_quicker_than_workers_start() -> None:
    surge = {"start_hour": 20.3, "hours": 0.7, "cold_start_s": 300.0, "max_parked": 120}
    cold, warm = run("own", **surge), run("own", **surge, min_parked=60)
    assert warm.within_target > 0.99 > 0.95 > cold.within_target
    assert warm.cost < 1.1 * cold.cost


def test_who_knows_only_a_lag_serves_the_same_traffic_worse() -> None:
    afternoon = {"start_hour": 12.0, "hours": 1.0, "peak": 0.9}
    own = run("own", **afternoon)
    lag = run("lag-threshold", **afternoon)
    assert own.num_requests == lag.num_requests
    assert own.within_target > 0.99 and (lag.within_target < own.within_target or lag.cost > own.cost)


def test_too_few_workers_shed_what_would_wait_too_long_and_serve_the_rest() -> None:
    overloaded = run("fixed-mean", start_hour=9.0, hours=1.0, fixed_load=1.0, max_wait_s=20.0)
    assert overloaded.num_shed > 10_000
    assert overloaded.ttft_p99_s < 30
    assert overloaded.num_unserved < 0.02 * overloaded.num_requests
