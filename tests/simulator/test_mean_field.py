"""The model of a large fleet against what must hold of any, and against the simulation of every token."""

import numpy as np
import pytest

from headrace_simulator.arrivals import nothing
from headrace_simulator.checking import compare
from headrace_simulator.mean_field import MeanField
from headrace_worker.timing.roofline import work_of
from tests.simulator.builders import arrivals, kind


def model(weight: int = 1, step_s: float = 1.0) -> MeanField:
    return MeanField(kind(), step_s=step_s, weight=weight, max_answer=2048)


def test_a_lone_request_takes_what_the_roofline_says() -> None:
    fleet = model()
    step = fleet.step(0.0, 4, arrivals(1, prompt=2000, answer=600))
    prompt_s = kind().roofline.iteration_s(work_of([(0, 2000)]))
    assert prompt_s < step.ttft_s[0] < prompt_s + 0.05
    decode_s = kind().roofline.iteration_s(work_of([(2000, 1)]))
    ended_at = next(at for at in range(1, 20) if fleet.step(float(at), 4, nothing()).num_finished)
    assert ended_at == pytest.approx(600 * decode_s, abs=1.5)


def test_every_request_gets_one_first_token_and_one_end() -> None:
    fleet = model()
    came = first = ended = 0
    random = np.random.default_rng(1)
    for at in range(400):
        batch = arrivals(int(random.integers(0, 60)) if at < 200 else 0, answer=int(random.integers(1, 500)))
        step = fleet.step(float(at), int(random.integers(2, 6)) if at < 200 else 3, batch)
        came, first, ended = came + batch.num, first + len(step.ttft_s), ended + step.num_finished
    assert came == first == ended > 4000
    load = fleet.load(400.0)
    assert load.num_running == load.num_waiting == load.num_waiting_tokens == load.kv_use == 0


def test_without_a_worker_requests_wait_and_are_served_in_order_once_there_is_one() -> None:
    fleet = model()
    for at in range(10):
        assert len(fleet.step(float(at), 0, arrivals(5)).ttft_s) == 0
    load = fleet.load(10.0)
    assert load.num_waiting == 50 and load.num_waiting_tokens == 50_000 and load.oldest_wait_s == pytest.approx(10.0)
    served = fleet.step(10.0, 1, nothing()).ttft_s
    assert len(served) == 50
    assert served.max() > 10 and list(np.sort(served)[::-1][:5]) == sorted(served[:5], reverse=True)


def test_a_prompt_that_fills_the_whole_cache_does_not_stop_the_queue_for_ever() -> None:
    fleet = model()
    fleet.step(0.0, 1, arrivals(1, prompt=kind().kv_tokens - 1, answer=1))
    fleet.step(1.0, 1, arrivals(1, prompt=10, answer=1))
    for at in range(2, 600):
        fleet.step(float(at), 1, nothing())
    load = fleet.load(600.0)
    assert (load.num_waiting, load.num_running) == (0, 0)


def test_overload_makes_a_queue_that_grows_as_the_surplus() -> None:
    workers = 2
    capacity = kind().capacity(1000, 200)
    rate = int(3 * workers * capacity)
    fleet = model()
    for at in range(60):
        fleet.step(float(at), workers, arrivals(rate))
    early = fleet.load(60.0).num_waiting
    for at in range(60, 120):
        fleet.step(float(at), workers, arrivals(rate))
    growth = (fleet.load(120.0).num_waiting - early) / 60
    assert 0.5 * rate < growth < 0.75 * rate
    assert fleet.load(120.0).batch_occupancy == 1.0


def test_a_worker_that_goes_costs_its_prompts_again() -> None:
    steady, shrinking = model(), model()
    for fleet, later in ((steady, 4), (shrinking, 2)):
        for at in range(30):
            fleet.step(float(at), 4, arrivals(30))
        fleet.step(30.0, later, nothing())
    assert shrinking._backlog > 0 or shrinking.load(31.0).utilization >= steady.load(31.0).utilization
    late = [
        float(np.median(fleet.step(31.0, later, arrivals(30)).ttft_s)) for fleet, later in ((steady, 4), (shrinking, 2))
    ]
    assert late[1] > late[0]


def test_weighted_requests_are_the_same_load() -> None:
    figures = []
    for weight in (1, 10):
        fleet = model(weight)
        for at in range(60):
            fleet.step(float(at), 20, arrivals(200 // weight))
        load = fleet.load(60.0)
        figures.append((load.num_running * weight, load.batch_occupancy, load.kv_use))
    assert figures[1] == pytest.approx(figures[0], rel=0.1)


@pytest.mark.parametrize("load", [0.4, 0.8])
def test_both_details_tell_the_same(load: float) -> None:
    """Token by token the scheduler's own core and the workers' own loops ran."""
    _, requests, tokens = compare(kind(), 4, 14.0, 0, load)
    assert requests.finished_per_s == pytest.approx(tokens.finished_per_s, rel=0.1)
    assert requests.num_running == pytest.approx(tokens.num_running, rel=0.25)
    assert requests.ttft_p50_s == pytest.approx(tokens.ttft_p50_s, rel=0.3)
    assert requests.ttft_p99_s == pytest.approx(tokens.ttft_p99_s, rel=0.5)
