"""What an autoscaler hears of a fleet."""

from headrace_shared.fleet_messages import Hello, Telemetry, WorkerState
from headrace_shared.messages import WorkerId


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


def figures(service: str, service_id: str, model: str = "", **gauges: float) -> Telemetry:
    return Telemetry(service=service, id=service_id, state="ready", model=model, gauges=gauges)
