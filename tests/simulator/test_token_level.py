"""The scheduler's core and the workers' loops in virtual time."""

import numpy as np

from headrace_simulator.arrivals import nothing
from headrace_simulator.token_level import TokenLevel
from tests.simulator.builders import arrivals, kind


def test_every_request_gets_one_first_token_and_one_end_while_workers_come_and_go() -> None:
    fleet = TokenLevel(kind(max_sequences=8), step_s=0.5)
    came = first = ended = 0
    random = np.random.default_rng(2)
    for at in range(60):
        batch = arrivals(int(random.integers(0, 12)) if at < 20 else 0, prompt=300, answer=40)
        step = fleet.step(at / 2, int(random.integers(0, 4)) if at < 20 else 2, batch)
        came, first, ended = came + batch.num, first + len(step.ttft_s), ended + step.num_finished
        fleet._scheduler.check_integrity()
    assert came == first == ended > 50
    load = fleet.load(30.0)
    assert load.num_running == load.num_waiting == 0 and load.kv_use == 0.0


def test_without_a_worker_requests_wait() -> None:
    fleet = TokenLevel(kind(), step_s=0.5)
    for at in range(4):
        assert not len(fleet.step(at / 2, 0, arrivals(3)).ttft_s)
    load = fleet.load(2.0)
    assert load.num_waiting == 12 and 1.5 <= load.oldest_wait_s <= 2.0 and load.num_waiting_tokens == 12_000
    served = [fleet.step(2.0 + at / 2, 1, nothing()).ttft_s for at in range(4)]
    assert sum(map(len, served)) == 12


def test_the_same_seed_gives_the_same_run() -> None:
    runs = []
    for _ in range(2):
        fleet = TokenLevel(kind(), step_s=0.5, seed=4)
        runs.append([fleet.step(at / 2, 2, arrivals(10 if at < 3 else 0)).ttft_s.tolist() for at in range(6)])
    assert runs[0] == runs[1] and sum(map(len, runs[0])) == 30
