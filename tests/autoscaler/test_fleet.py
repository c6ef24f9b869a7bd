from headrace_autoscaler.fleet import SILENT_AFTER_S, Fleet, ModelFleet
from headrace_shared.messages import Hello, Telemetry, WorkerId, WorkerState


def hello(worker: str, model: str = "tiny", state: WorkerState = WorkerState.READY, max_sequences: int = 8) -> Hello:
    return Hello(
        worker=WorkerId(worker),
        model=model,
        state=state,
        epoch=1,
        num_blocks=64,
        block_size=16,
        context=1024,
        max_sequences=max_sequences,
        tokens_per_iteration=64,
    )


def test_counts_each_model_by_itself() -> None:
    fleet = Fleet()
    for worker, model in (("w1", "a"), ("w2", "a"), ("w3", "b")):
        fleet.on_hello(hello(worker, model), 0)
    fleet.on_telemetry(Telemetry(service="worker", id="w1", state="ready", gauges={"num_running": 3.0}))
    fleet.on_telemetry(Telemetry(service="worker", id="w2", state="ready", gauges={"num_running": 2.0}))
    fleet.on_telemetry(Telemetry(service="router", id="r1", state="ready", gauges={"num_running": 9.0}))
    assert fleet.models == ["a", "b"]
    assert fleet.of("a", 0) == ModelFleet(2, 5, 8)
    assert fleet.of("b", 0) == ModelFleet(1, 0, 8)


def test_workers_that_leave_do_not_count_but_their_sequences_do() -> None:
    fleet = Fleet()
    fleet.on_hello(hello("w1", state=WorkerState.LOADING, max_sequences=0), 0)
    fleet.on_hello(hello("w2", state=WorkerState.DRAINING), 0)
    fleet.on_telemetry(Telemetry(service="worker", id="w2", state="draining", gauges={"num_running": 3.0}))
    assert fleet.of("tiny", 0) == ModelFleet(1, 3, 0)


def test_silent_workers_are_gone_but_their_model_is_not() -> None:
    fleet = Fleet()
    fleet.on_hello(hello("w1"), 0)
    fleet.on_hello(hello("w2"), 3)
    assert fleet.of("tiny", SILENT_AFTER_S).num_workers == 2
    assert fleet.of("tiny", SILENT_AFTER_S + 1).num_workers == 1
    assert fleet.of("tiny", 100).num_workers == 0
    assert fleet.models == ["tiny"]
