"""What the workers say on the bus, summed up for each model. Time is an argument."""

from typing import NamedTuple

from headrace_shared.messages import Hello, Telemetry, WorkerId, WorkerState
from headrace_shared.telemetry import NUM_RUNNING

SILENT_AFTER_S = 5.0
"""A worker that has said nothing for so long counts as gone."""
MAX_WORKERS = 10_000
MAX_MODELS = 1_000


class ModelFleet(NamedTuple):
    num_workers: int
    num_sequences: int
    worker_capacity: int


class _Heard(NamedTuple):
    hello: Hello
    at: float


class Fleet:
    def __init__(self) -> None:
        self._heard: dict[WorkerId, _Heard] = {}
        self._num_running: dict[str, float] = {}
        self._models: dict[str, None] = {}

    @property
    def models(self) -> list[str]:
        """Every model heard of, also those whose workers are gone."""
        return sorted(self._models)

    def on_hello(self, hello: Hello, now: float) -> None:
        self._expire(now)
        if hello.worker in self._heard or len(self._heard) < MAX_WORKERS:
            self._heard[hello.worker] = _Heard(hello, now)
        if len(self._models) < MAX_MODELS:
            self._models.setdefault(hello.model)

    def on_telemetry(self, figures: Telemetry) -> None:
        if WorkerId(figures.id) in self._heard:
            self._num_running[figures.id] = figures.gauges.get(NUM_RUNNING, 0.0)

    def of(self, model: str, now: float) -> ModelFleet:
        self._expire(now)
        hellos = [heard.hello for heard in self._heard.values() if heard.hello.model == model]
        staying = [hello for hello in hellos if hello.state in (WorkerState.LOADING, WorkerState.READY)]
        capacity = min((hello.max_sequences for hello in staying if hello.max_sequences), default=0)
        num_sequences = sum(self._num_running.get(hello.worker, 0.0) for hello in hellos)
        return ModelFleet(len(staying), int(num_sequences), capacity)

    def _expire(self, now: float) -> None:
        for worker in [worker for worker, heard in self._heard.items() if now - heard.at > SILENT_AFTER_S]:
            del self._heard[worker]
            self._num_running.pop(worker, None)
