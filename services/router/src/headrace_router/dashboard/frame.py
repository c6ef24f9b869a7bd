"""One second of the whole system, as the live page gets it. Pure.

A frame tells everything about small fleets; of large ones it has the sums of all workers and only the first of them one
by one, so that its size is bounded.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace_router.dashboard.board import Board, Spoken
from headrace_shared import telemetry
from headrace_shared.fleet_frame import (
    AutoscalerFrame,
    Frame,
    OverflowFrame,
    QueueFrame,
    RouterFrame,
    ScalingFrame,
    SchedulerFrame,
    Totals,
    WorkerFrame,
)
from headrace_shared.fleet_messages import Hello, WorkerState

MAX_WORKERS = 64
"""Told one by one."""
MAX_PEERS = 16
"""Routers, schedulers, autoscalers and models told one by one."""

TTFT_P50_S = "ttft_p50_s"
"""A router's own gauge: of the first tokens of the last seconds."""
TTFT_P99_S = "ttft_p99_s"
NUM_FIRST_TOKENS = "num_first_tokens"
"""How many these two are of."""
REQUESTS_PER_S = "requests_per_s"
"""Calls that a router took in, over the same time."""


class Depth(NamedTuple):
    """Of one model's queue, all lanes; None: the broker did not say."""

    waiting: int | None
    taken: int | None


def make_frame(board: Board, depths: Mapping[str, Depth], seq: int, at: float) -> Frame:
    spoken_routers = board.of("router")
    schedulers = [_scheduler(spoken) for spoken in board.of("scheduler")]
    workers = [_worker(hello, spoken) for hello, spoken in board.workers()]
    autoscalers = [_autoscaler(spoken) for spoken in board.of("autoscaler")]
    queues = [QueueFrame(model=model, waiting=depth.waiting, taken=depth.taken) for model, depth in depths.items()]
    return Frame(
        seq=seq,
        at=at,
        totals=_totals(spoken_routers, queues, schedulers, workers, autoscalers),
        routers=[_router(spoken) for spoken in spoken_routers][:MAX_PEERS],
        queues=queues[:MAX_PEERS],
        schedulers=schedulers[:MAX_PEERS],
        workers=workers[:MAX_WORKERS],
        num_workers=len(workers),
        autoscalers=autoscalers[:MAX_PEERS],
        overflows=_overflows(spoken_routers)[:MAX_PEERS],
    )


def _totals(
    routers: Sequence[Spoken],
    queues: Sequence[QueueFrame],
    schedulers: Sequence[SchedulerFrame],
    workers: Sequence[WorkerFrame],
    autoscalers: Sequence[AutoscalerFrame],
) -> Totals:
    ready = [worker for worker in workers if worker.state == WorkerState.READY]
    places = sum(worker.max_sequences for worker in ready)
    blocks = sum(worker.blocks for worker in workers)
    running = sum(worker.running for worker in workers)
    waiting = [queue.waiting for queue in queues]
    known = [number for number in waiting if number is not None]
    is_known = len(known) == len(waiting)
    p50, p99 = _ttfts(routers)
    leaders = [each for each in autoscalers if each.is_leader and each.models]
    return Totals(
        queue=sum(known) + sum(scheduler.waiting for scheduler in schedulers) if is_known else None,
        in_flight=sum(int(router.gauge(telemetry.NUM_IN_FLIGHT)) for router in routers),
        running=running,
        tokens_per_s=round(sum(worker.tokens_per_s for worker in workers), 1),
        prefill_per_s=round(sum(worker.prefill_per_s for worker in workers), 1),
        ttft_p50_ms=p50,
        ttft_p99_ms=p99,
        batch=round(min(1.0, sum(worker.running for worker in ready) / places), 4) if places else 0.0,
        kv=round(sum(worker.blocks_held for worker in workers) / blocks, 4) if blocks else 0.0,
        ready=len(ready),
        starting=sum(worker.state == WorkerState.LOADING for worker in workers),
        parked=sum(worker.state == WorkerState.PARKED for worker in workers),
        draining=sum(worker.state == WorkerState.DRAINING for worker in workers),
        desired=sum(model.desired for model in leaders[0].models) if leaders else None,
    )


def _ttfts(routers: Sequence[Spoken]) -> tuple[float | None, float | None]:
    """Over all routers: the median as the mean of theirs, by number; the high percentile as the worst of theirs. None
    where nothing has begun to be answered lately."""
    answering = [router for router in routers if router.gauge(NUM_FIRST_TOKENS) > 0]
    if not answering:
        return None, None
    count = sum(router.gauge(NUM_FIRST_TOKENS) for router in answering)
    median = sum(router.gauge(TTFT_P50_S) * router.gauge(NUM_FIRST_TOKENS) for router in answering) / count
    return round(1000.0 * median, 2), round(1000.0 * max(router.gauge(TTFT_P99_S) for router in answering), 2)


def _router(spoken: Spoken) -> RouterFrame:
    p50, p99 = _ttfts([spoken])
    return RouterFrame(
        id=spoken.figures.id,
        state=spoken.figures.state,
        in_flight=int(spoken.gauge(telemetry.NUM_IN_FLIGHT)),
        requests_per_s=round(spoken.gauge(REQUESTS_PER_S), 2),
        ttft_p50_ms=p50,
        ttft_p99_ms=p99,
    )


def _scheduler(spoken: Spoken) -> SchedulerFrame:
    return SchedulerFrame(
        id=spoken.figures.id,
        model=spoken.figures.model,
        state=spoken.figures.state,
        waiting=int(spoken.gauge(telemetry.NUM_WAITING)),
        running=int(spoken.gauge(telemetry.NUM_RUNNING)),
        oldest_wait_s=round(spoken.gauge(telemetry.OLDEST_WAIT_S), 2),
        preemptions=int(spoken.gauge("num_preemptions")),
        losses=int(spoken.gauge("num_losses")),
    )


def _worker(hello: Hello, spoken: Spoken | None) -> WorkerFrame:
    if spoken is None:
        return WorkerFrame(id=hello.worker, model=hello.model, state=str(hello.state))
    blocks = int(spoken.gauge(telemetry.NUM_BLOCKS)) or hello.num_blocks
    return WorkerFrame(
        id=hello.worker,
        model=hello.model,
        state=str(hello.state),
        running=int(spoken.gauge(telemetry.NUM_RUNNING)),
        stalled=int(spoken.gauge("num_stalled")),
        max_sequences=hello.max_sequences,
        blocks=blocks,
        blocks_held=max(0, blocks - int(spoken.figures.gauges.get(telemetry.NUM_FREE_BLOCKS, blocks))),
        tokens_per_s=round(spoken.gauge(telemetry.TOKENS_PER_S), 1),
        prefill_per_s=round(spoken.prefill_tokens_per_s, 1),
        is_cuda=bool(spoken.gauge(telemetry.IS_CUDA)),
    )


def _autoscaler(spoken: Spoken) -> AutoscalerFrame:
    gauges = spoken.figures.gauges
    models: list[ScalingFrame] = []
    for name, value in sorted(gauges.items()):
        gauge, _, model = name.partition(":")
        if gauge == "desired_workers" and len(models) < MAX_PEERS:
            most = gauges.get(telemetry.of_model(telemetry.MAX_WORKERS_OF, model))
            models.append(
                ScalingFrame(
                    model=model,
                    desired=int(value),
                    most=None if most is None else int(most),
                    coming=int(gauges.get(telemetry.of_model(telemetry.COMING_WORKERS_OF, model), 0.0)),
                    coming_in_s=gauges.get(telemetry.of_model(telemetry.COMING_IN_S_OF, model)),
                )
            )
    # One that stands by says nothing of models.
    is_leader = bool(gauges.get("is_leader", float(bool(models))))
    return AutoscalerFrame(id=spoken.figures.id, state=spoken.figures.state, is_leader=is_leader, models=models)


def _overflows(routers: Sequence[Spoken]) -> list[OverflowFrame]:
    counts: dict[str, int] = {}
    for router in routers:
        for name, value in router.figures.gauges.items():
            gauge, _, model = name.partition(":")
            if gauge == telemetry.OVERFLOWED_OF and model:
                counts[model] = counts.get(model, 0) + int(value)
    return [OverflowFrame(model=model, num_requests=count) for model, count in sorted(counts.items())]
