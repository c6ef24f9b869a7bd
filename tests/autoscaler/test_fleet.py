from headrace_autoscaler.fleet import FORGET_S, Fleet
from headrace_autoscaler.standing import SILENT_AFTER_S
from headrace_shared.fleet_messages import Telemetry, WorkerState
from headrace_shared.messages import WorkerId
from tests.autoscaler.heard import figures, hello


def test_counts_each_model_by_itself() -> None:
    fleet = Fleet()
    for worker, model in (("w1", "a"), ("w2", "a"), ("w3", "b")):
        fleet.on_hello(hello(worker, model), 0)
    fleet.on_telemetry(figures("worker", "w1", num_running=3.0, num_blocks=64, num_free_blocks=16), 0)
    fleet.on_telemetry(figures("worker", "w2", num_running=2.0, num_blocks=64, num_free_blocks=64), 0)
    fleet.on_telemetry(figures("stranger", "r1", num_running=9.0), 0)
    assert fleet.models == ["a", "b"]
    a, b = fleet.of("a", 0), fleet.of("b", 0)
    assert (a.num_ready, a.num_sequences, a.worker_capacity) == (2, 5, 8)
    assert a.batch_occupancy == 5 / 16 and a.kv_use == 48 / 128
    assert (b.num_ready, b.num_sequences) == (1, 0) and b.kv_use is None and b.batch_occupancy is None


def test_workers_that_leave_take_nothing_but_their_sequences_count() -> None:
    fleet = Fleet()
    fleet.on_hello(hello("w1", state=WorkerState.LOADING, max_sequences=0), 0)
    fleet.on_hello(hello("w2", state=WorkerState.DRAINING), 0)
    fleet.on_telemetry(figures("worker", "w2", num_running=3.0), 0)
    seen = fleet.of("tiny", 0)
    assert (seen.num_ready, seen.num_sequences, seen.worker_capacity) == (0, 3, 8)


def test_silent_workers_take_nothing_and_are_forgotten_later_but_their_model_is_not() -> None:
    fleet = Fleet()
    fleet.on_hello(hello("w1"), 0)
    fleet.on_hello(hello("w2"), 3)
    assert fleet.of("tiny", SILENT_AFTER_S).num_ready == 2
    assert fleet.of("tiny", SILENT_AFTER_S + 1).num_ready == 1
    assert fleet.heard("tiny", 60)[WorkerId("w1")].silent_for_s == 60
    assert fleet.heard("tiny", FORGET_S + 1).keys() == {"w2"}
    assert fleet.heard("tiny", FORGET_S + 4) == {} and fleet.models == ["tiny"]


def test_what_schedulers_and_routers_hold_for_a_model() -> None:
    fleet = Fleet()
    fleet.add_models(["tiny"])
    fleet.on_telemetry(figures("scheduler", "s1", "tiny", num_waiting=4, oldest_wait_s=1.5), 0)
    fleet.on_telemetry(figures("scheduler", "s2", "tiny", num_waiting=2, oldest_wait_s=7.0), 0)
    fleet.on_telemetry(figures("scheduler", "s3", "other", num_waiting=9, oldest_wait_s=99.0), 0)
    for router, ttft in (("r1", 0.4), ("r2", 0.9)):
        gauges = {"wanted:tiny": 2.0, "waiting_tokens:tiny": 100.0, "ttft_p95_s:tiny": ttft, "wanted:other": 5.0}
        fleet.on_telemetry(Telemetry(service="router", id=router, state="ready", gauges=gauges), 0)
    seen = fleet.of("tiny", 1)
    assert (seen.num_in_windows, seen.oldest_wait_s, seen.num_wanted, seen.num_waiting_tokens) == (6, 7.0, 4, 200)
    assert seen.ttft_s == 0.9
    assert fleet.of("tiny", SILENT_AFTER_S + 1).num_in_windows == 0


def test_the_pace_of_a_worker_is_read_off_its_counters() -> None:
    fleet = Fleet()
    fleet.on_hello(hello("w1"), 0)
    for number, (tokens, busy_s) in enumerate([(0, 0.0), (1000, 2.0), (1010, 30.0), (3010, 31.0), (10, 0.1)]):
        fleet.on_telemetry(figures("worker", "w1", num_prefill_tokens=tokens, busy_s=busy_s), number)
    # 2010 tokens in 29 s, most of it for other things; the start of a new counter says nothing.
    assert 400 < fleet.of("tiny", 4).worker_tokens_per_s <= 500
