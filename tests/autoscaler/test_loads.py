"""A worker's load from its counters, against workers whose costs are known."""

import pytest

from headrace_autoscaler.loads import Loads, Rates, counters_of
from headrace_shared.engine_speed import EngineSpeed, Work
from headrace_shared.messages import WorkerId

TRUE = EngineSpeed(per_iteration=7e-3, per_output=7e-5, per_prompt=2.5e-5)
PLACES = 256


class Reporter:
    """A worker that does so many outputs and prompt tokens a second, in batches of so many sequences."""

    def __init__(self, name: str) -> None:
        self.id = WorkerId(name)
        self.counters = Work(0.0, 0.0, 0.0, 0.0)

    def second(self, outputs: float, prompt_tokens: float, batch: float) -> Work:
        iterations = outputs / batch
        busy_s = iterations * TRUE.per_iteration + outputs * TRUE.per_output + prompt_tokens * TRUE.per_prompt
        added = (busy_s, iterations, outputs, prompt_tokens)
        self.counters = Work(*(old + new for old, new in zip(self.counters, added, strict=True)))
        return self.counters


def warmed(loads: Loads, worker: Reporter, seconds: int = 60) -> float:
    """Many kinds of seconds, so that the costs can be told apart. Returns the time."""
    for second in range(seconds):
        loads.on_counters(
            worker.id, worker.second(500 + 37 * (second % 7), 900 * (second % 5), 5 + second % 11), second
        )
    return float(seconds)


@pytest.mark.parametrize("batch", [4, 30, 200])
def test_the_load_is_what_the_tokens_cost_however_many_sequences_share_an_iteration(batch: float) -> None:
    loads, worker = Loads(), Reporter("w1")
    now = warmed(loads, worker)
    for second in range(30):
        loads.on_counters(worker.id, worker.second(400, 4000, batch), now + second)
    expected = TRUE.load(400, 4000, 0.8 * PLACES)
    assert loads.load({worker.id: PLACES}) == pytest.approx(expected, rel=0.1)


def test_a_worker_that_has_just_come_does_nothing_yet() -> None:
    loads, worker = Loads(), Reporter("w1")
    warmed(loads, worker)
    one = loads.load({worker.id: PLACES})
    assert one is not None
    assert loads.load({worker.id: PLACES, WorkerId("new"): PLACES}) == pytest.approx(one / 2)


def test_a_worker_whose_figures_are_lost_goes_on_as_it_did() -> None:
    loads, worker = Loads(), Reporter("w1")
    warmed(loads, worker)
    before = loads.load({worker.id: PLACES})
    loads.forget([worker.id])
    assert loads.load({worker.id: PLACES}) == before
    loads.forget([])
    assert loads.load({worker.id: PLACES}) is None


def test_counters_that_fell_start_anew() -> None:
    loads, worker = Loads(), Reporter("w1")
    now = warmed(loads, worker)
    before = loads.load({worker.id: PLACES})
    loads.on_counters(worker.id, Work(0.0, 0.0, 0.0, 0.0), now)
    assert loads.load({worker.id: PLACES}) == pytest.approx(0.0)
    assert before is not None and before > 0


def test_idle_workers_have_no_load_and_unknown_speed_none() -> None:
    loads, worker = Loads(), Reporter("w1")
    loads.on_counters(worker.id, worker.counters, 0.0)
    assert loads.load({worker.id: PLACES}) is None
    now = warmed(loads, worker)
    for second in range(60):
        loads.on_counters(worker.id, worker.counters, now + second)
    assert loads.load({worker.id: PLACES}) == pytest.approx(0.0, abs=1e-3)
    assert loads.load({}) is None


def test_a_worker_that_does_not_report_all_of_it_is_left_out() -> None:
    whole = {"busy_s": 1.0, "num_iterations": 2.0, "num_output_tokens": 3.0, "num_prefill_tokens": 4.0}
    assert counters_of(whole) == Work(1.0, 2.0, 3.0, 4.0)
    assert counters_of({key: value for key, value in whole.items() if key != "busy_s"}) is None


def test_two_reports_at_the_same_time_are_one() -> None:
    rates = Rates(Work(0.0, 0.0, 0.0, 0.0), 5.0)
    assert rates.after(Work(1.0, 1.0, 100.0, 0.0), 5.0) is rates
