"""What the workers can do, by what they and the autoscaler say. Pure: time is an argument."""

from typing import NamedTuple

from headrace_router.forecast import Capacity, Mix
from headrace_shared import telemetry
from headrace_shared.engine_speed import EngineSpeed, SpeedMeter, Work
from headrace_shared.fleet_messages import Hello, Telemetry, WorkerState
from headrace_shared.messages import WorkerId

WORKER_TIMEOUT_S = 3.0
"""A worker not heard of for so long does not count. They say hello every second."""
AUTOSCALER_TIMEOUT_S = 10.0
MAX_WORKERS = 10_000
MAX_MODELS = 1000
FIRST_START_S = 30.0
"""How long a worker takes to start, until one was seen to."""
LEARNING = 0.3
OVERDUE_SHARE = 0.2
FORGET_S = 60.0
"""A worker that has said nothing for so long is gone, without a word."""
HORIZON_BLOCKS = 2
"""Each sequence is granted about so many blocks ahead."""


class Plans(NamedTuple):
    """What the autoscaler says of one model."""

    max_workers: int
    num_coming: int
    coming_in_s: float
    start_s: float
    """0 if it does not say."""
    heard_at: float


class _Worker:
    __slots__ = ("figures", "figures_at", "heard_at", "hello", "loading_since", "num_running")

    def __init__(self, hello: Hello, now: float) -> None:
        self.hello = hello
        self.heard_at = now
        self.loading_since = now if hello.state is WorkerState.LOADING else None
        self.figures: dict[str, float] = {}
        self.figures_at = now
        self.num_running = 0.0


class Capacities:
    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Worker] = {}
        self._last: dict[str, _Worker] = {}
        """Of each model the worker that was last heard of with its size: the next one will be like it."""
        self._meters: dict[str, SpeedMeter] = {}
        self._plans: dict[str, Plans] = {}
        self._start_s: dict[str, float] = {}

    def on_hello(self, hello: Hello, now: float) -> None:
        if hello.state is WorkerState.LEAVING:
            self._workers.pop(hello.worker, None)
            return
        worker = self._workers.get(hello.worker)
        if worker is None:
            self._expire(now)
            if len(self._workers) < MAX_WORKERS:
                self._workers[hello.worker] = worker = _Worker(hello, now)
                self._remember(worker)
            return
        if worker.loading_since is not None and hello.state is not WorkerState.LOADING:
            self._on_loaded(hello.model, now - worker.loading_since)
            worker.loading_since = None
        worker.hello = hello
        worker.heard_at = now
        self._remember(worker)

    def _remember(self, worker: _Worker) -> None:
        model = worker.hello.model
        if worker.hello.max_sequences > 0 and (model in self._last or len(self._last) < MAX_MODELS):
            self._last[model] = worker

    def on_figures(self, figures: Telemetry, now: float) -> None:
        if figures.service == "autoscaler":
            self._on_plans(figures.gauges, now)
        elif figures.service == "worker" and (worker := self._workers.get(WorkerId(figures.id))) is not None:
            self._on_work(worker, figures.gauges, now)

    def on_reconnect(self, now: float) -> None:
        """Nobody could be heard for a while. Who is still there will be soon."""
        for worker in self._workers.values():
            worker.heard_at = now
        self._plans = {model: plans._replace(heard_at=now) for model, plans in self._plans.items()}

    def num_ready(self, model: str, now: float) -> int:
        return len(self._ready(model, now))

    def can_wake(self, model: str, now: float) -> bool:
        """An autoscaler is there that may start workers of it."""
        plans = self._plans_of(model, now)
        return plans is not None and plans.max_workers > 0

    def wakeable(self, now: float) -> list[str]:
        return sorted(model for model in self._plans if self.can_wake(model, now))

    def has_prospect(self, model: str, now: float) -> bool:
        """There is a worker, or one is on its way, or may be started."""
        present = any(self._is_present(worker, model, now) for worker in self._workers.values())
        return present or self.can_wake(model, now)

    def speed(self, model: str) -> EngineSpeed | None:
        meter = self._meters.get(model)
        return None if meter is None else meter.speed()

    def of(self, model: str, mix: Mix, now: float) -> Capacity | None:
        """None if nothing is known of its speed."""
        speed = self.speed(model)
        if speed is None:
            return None
        ready = self._ready(model, now)
        known = [worker for worker in ready if worker.hello.max_sequences > 0]
        if not known and model in self._last:
            known = [self._last[model]]
        return Capacity(
            num_ready=len(ready),
            num_places=max(1, round(_mean([_places(worker, mix) for worker in known], 1.0))),
            num_tokens=max(1, round(_mean([worker.hello.tokens_per_iteration for worker in known], 256.0))),
            speed=speed,
            coming=self._coming(model, len(ready), now),
        )

    def start_s(self, model: str, now: float) -> float:
        """How long a worker takes from the decision to start it until it is ready."""
        plans = self._plans_of(model, now)
        if plans is not None and plans.start_s > 0.0:
            return plans.start_s
        return self._start_s.get(model, FIRST_START_S)

    def _coming(self, model: str, num_ready: int, now: float) -> tuple[float, ...]:
        start_s = self.start_s(model, now)
        loading = [
            _left_s(start_s, now - worker.loading_since)
            for worker in self._workers.values()
            if worker.loading_since is not None and self._is_present(worker, model, now)
        ]
        plans = self._plans_of(model, now)
        if plans is not None:
            loading += [max(0.5, plans.coming_in_s - (now - plans.heard_at))] * (plans.num_coming - len(loading))
        if not loading and not num_ready and self.can_wake(model, now):
            loading = [start_s]
        return tuple(sorted(loading))

    def _ready(self, model: str, now: float) -> list[_Worker]:
        return [
            worker
            for worker in self._workers.values()
            if worker.hello.state is WorkerState.READY and self._is_present(worker, model, now)
        ]

    def _is_present(self, worker: _Worker, model: str, now: float) -> bool:
        return worker.hello.model == model and now - worker.heard_at <= WORKER_TIMEOUT_S

    def _plans_of(self, model: str, now: float) -> Plans | None:
        plans = self._plans.get(model)
        return None if plans is None or now - plans.heard_at > AUTOSCALER_TIMEOUT_S else plans

    def _on_loaded(self, model: str, seconds: float) -> None:
        before = self._start_s.get(model)
        if before is not None or len(self._start_s) < MAX_MODELS:
            self._start_s[model] = seconds if before is None else before + LEARNING * (seconds - before)

    def _on_plans(self, gauges: dict[str, float], now: float) -> None:
        by_model: dict[str, dict[str, float]] = {}
        for name, value in gauges.items():
            gauge, colon, model = name.partition(":")
            if colon:
                by_model.setdefault(model, {})[gauge] = value
        for model, said in by_model.items():
            if telemetry.MAX_WORKERS_OF in said and (model in self._plans or len(self._plans) < MAX_MODELS):
                self._plans[model] = Plans(
                    int(said[telemetry.MAX_WORKERS_OF]),
                    min(MAX_WORKERS, int(said.get(telemetry.COMING_WORKERS_OF, 0))),
                    said.get(telemetry.COMING_IN_S_OF, 0.0),
                    said.get(telemetry.START_S_OF, 0.0),
                    now,
                )

    def _on_work(self, worker: _Worker, gauges: dict[str, float], now: float) -> None:
        worker.num_running = gauges.get(telemetry.NUM_RUNNING, 0.0)
        before, worker.figures = worker.figures, gauges
        elapsed_s, worker.figures_at = now - worker.figures_at, now
        if telemetry.BUSY_S not in before or telemetry.BUSY_S not in gauges:
            return
        busy_s, *counts = (
            gauges.get(name, 0.0) - before.get(name, 0.0)
            for name in (
                telemetry.BUSY_S,
                telemetry.NUM_ITERATIONS,
                telemetry.NUM_OUTPUT_TOKENS,
                telemetry.NUM_PREFILL_TOKENS,
            )
        )
        if min(busy_s, *counts) < 0.0:
            return  # it has started anew
        meter = self._meters.get(worker.hello.model)
        if meter is None:
            if len(self._meters) >= MAX_MODELS:
                return
            meter = self._meters[worker.hello.model] = SpeedMeter()
        # Iterations that overlap (pipelines) are longer than what they cost.
        meter.observe(Work(min(busy_s, max(elapsed_s, 0.1)), *counts), now)

    def _expire(self, now: float) -> None:
        self._workers = {key: worker for key, worker in self._workers.items() if now - worker.heard_at <= FORGET_S}


def _left_s(start_s: float, elapsed_s: float) -> float:
    """Who takes longer than others did may take longer still."""
    return max(0.5, start_s - elapsed_s, OVERDUE_SHARE * elapsed_s if elapsed_s > start_s else 0.0)


def _places(worker: _Worker, mix: Mix) -> float:
    """Sequences at a time, by the batch and by the cache: on average an answer is half there."""
    hello = worker.hello
    each = mix.prompt_tokens + mix.output_tokens / 2 + HORIZON_BLOCKS * hello.block_size
    by_cache = hello.num_blocks * hello.block_size / max(1.0, each)
    return min(float(hello.max_sequences), max(1.0, by_cache, worker.num_running))


def _mean(values: list[float] | list[int], default: float) -> float:
    return sum(values) / len(values) if values else default
