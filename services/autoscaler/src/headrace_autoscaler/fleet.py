"""What workers, schedulers and routers say on the bus, summed up for each model. Time is an argument."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from headrace_autoscaler.loads import Loads, counters_of
from headrace_autoscaler.rates import PromptRate
from headrace_autoscaler.standing import SILENT_AFTER_S, Heard
from headrace_shared.fleet_messages import Hello, Telemetry, WorkerState
from headrace_shared.messages import WorkerId
from headrace_shared.telemetry import (
    BUSY_S,
    GPU_UTILIZATION,
    NUM_BLOCKS,
    NUM_FREE_BLOCKS,
    NUM_PREFILL_TOKENS,
    NUM_RUNNING,
    NUM_WAITING,
    OLDEST_WAIT_S,
    TTFT_P95_OF,
    WAITING_TOKENS_OF,
    WANTED_OF,
    of_model,
)

FORGET_S = 300.0
"""A worker that has said nothing for so long is remembered no more."""
MAX_WORKERS = 10_000
MAX_MODELS = 1_000
MAX_SERVICES = 10_000


class ModelFleet(NamedTuple):
    """What the policy needs of a model's workers, and of what schedulers and routers hold for it."""

    num_ready: int
    num_sequences: int
    """On all workers, also on those that leave."""
    worker_capacity: int
    """Sequences that one worker runs at a time: the least of those that said it; 0: nobody has."""
    num_in_windows: int
    """Sequences that wait in a scheduler for a worker."""
    oldest_wait_s: float
    num_wanted: int
    """Calls that routers hold because the model has never had a worker."""
    num_waiting_tokens: int
    worker_tokens_per_s: float
    ttft_s: float | None
    kv_use: float | None
    batch_occupancy: float | None
    gpu_utilization: float | None
    load: float | None
    """As in `Observation`."""


class _Worker(NamedTuple):
    hello: Hello
    at: float
    gauges: Mapping[str, float] = MappingProxyType({})
    rate: PromptRate = PromptRate()


class _Service(NamedTuple):
    figures: Telemetry
    at: float


class Fleet:
    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Worker] = {}
        self._services: dict[str, _Service] = {}
        """Schedulers and routers."""
        self._models: dict[str, None] = {}
        self._loads: dict[str, Loads] = {}

    @property
    def models(self) -> list[str]:
        """Every model heard of, also those whose workers are gone."""
        return sorted(self._models)

    def add_models(self, models: Iterable[str]) -> None:
        for model in models:
            if len(self._models) < MAX_MODELS:
                self._models.setdefault(model)

    def on_hello(self, hello: Hello, now: float) -> None:
        known = self._workers.get(hello.worker)
        if known is not None or len(self._workers) < MAX_WORKERS:
            self._workers[hello.worker] = _Worker(hello, now) if known is None else known._replace(hello=hello, at=now)
        self.add_models([hello.model])

    def on_telemetry(self, figures: Telemetry, now: float) -> None:
        worker = self._workers.get(WorkerId(figures.id))
        if worker is not None:
            gauges = figures.gauges
            rate = worker.rate.after(gauges.get(NUM_PREFILL_TOKENS, 0.0), gauges.get(BUSY_S, 0.0))
            self._workers[worker.hello.worker] = worker._replace(gauges=gauges, rate=rate)
            counters = counters_of(gauges)
            if counters is not None and worker.hello.model in self._models:
                loads = self._loads.setdefault(worker.hello.model, Loads())
                loads.on_counters(worker.hello.worker, counters, now)
        elif figures.service in ("scheduler", "router") and self._has_room(figures.id):
            self._services[figures.id] = _Service(figures, now)

    def heard(self, model: str, now: float) -> dict[WorkerId, Heard]:
        """The model's workers, also those that have been silent for a while."""
        self._expire(now)
        return {
            worker: Heard(
                state=each.hello.state,
                silent_for_s=now - each.at,
                is_parking=each.hello.is_parking,
                num_running=int(each.gauges.get(NUM_RUNNING, 0.0)),
                command_epoch=each.hello.command_epoch,
                failure=each.hello.failure,
            )
            for worker, each in self._workers.items()
            if each.hello.model == model
        }

    def highest_command_epoch(self, now: float) -> int:
        """That any worker which lives obeys."""
        lively = [each.hello for each in self._workers.values() if now - each.at <= SILENT_AFTER_S]
        return max((hello.command_epoch for hello in lively), default=0)

    def promotion_s(self, model: str) -> float:
        """How long a parked worker says it will take to be ready: the longest of them."""
        hellos = [each.hello for each in self._workers.values() if each.hello.model == model]
        return max((hello.promotion_s for hello in hellos if hello.state is WorkerState.PARKED), default=0.0)

    def of(self, model: str, now: float) -> ModelFleet:
        self._expire(now)
        workers = [
            each for each in self._workers.values() if each.hello.model == model and now - each.at <= SILENT_AFTER_S
        ]
        ready = [each for each in workers if each.hello.state is WorkerState.READY]
        services = [each.figures for each in self._services.values()]
        windows = [each.gauges for each in services if each.service == "scheduler" and each.model == model]
        routers = [each.gauges for each in services if each.service == "router"]
        ttfts = [value for each in routers if (value := each.get(of_model(TTFT_P95_OF, model))) is not None]
        rates = [each.rate.best for each in workers if each.rate.best]
        capacities = [each.hello.max_sequences for each in workers if each.hello.max_sequences]
        num_blocks = sum(each.gauges.get(NUM_BLOCKS, 0.0) for each in ready)
        num_free = sum(each.gauges.get(NUM_FREE_BLOCKS, 0.0) for each in ready)
        num_places = sum(each.hello.max_sequences for each in ready if each.gauges)
        num_running = sum(each.gauges.get(NUM_RUNNING, 0.0) for each in ready)
        return ModelFleet(
            num_ready=len(ready),
            num_sequences=int(sum(each.gauges.get(NUM_RUNNING, 0.0) for each in workers)),
            worker_capacity=min(capacities, default=0),
            num_in_windows=int(sum(each.get(NUM_WAITING, 0.0) for each in windows)),
            oldest_wait_s=max((each.get(OLDEST_WAIT_S, 0.0) for each in windows), default=0.0),
            num_wanted=int(sum(each.get(of_model(WANTED_OF, model), 0.0) for each in routers)),
            num_waiting_tokens=int(sum(each.get(of_model(WAITING_TOKENS_OF, model), 0.0) for each in routers)),
            worker_tokens_per_s=min(rates, default=0.0),
            ttft_s=max(ttfts, default=None),
            kv_use=1.0 - num_free / num_blocks if num_blocks else None,
            batch_occupancy=min(1.0, num_running / num_places) if num_places else None,
            gpu_utilization=_mean([value for each in ready if (value := each.gauges.get(GPU_UTILIZATION)) is not None]),
            load=self._load(model, {each.hello.worker: each.hello.max_sequences for each in ready}),
        )

    def _load(self, model: str, places: Mapping[WorkerId, int]) -> float | None:
        loads = self._loads.get(model)
        return None if loads is None else loads.load(places)

    def _has_room(self, service_id: str) -> bool:
        return service_id in self._services or len(self._services) < MAX_SERVICES

    def _expire(self, now: float) -> None:
        self._workers = {key: each for key, each in self._workers.items() if now - each.at <= FORGET_S}
        self._services = {key: each for key, each in self._services.items() if now - each.at <= SILENT_AFTER_S}
        for loads in self._loads.values():
            loads.forget(self._workers)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
