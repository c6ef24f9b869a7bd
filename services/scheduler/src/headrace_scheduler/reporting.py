"""The scheduler's figures: Prometheus metrics and Telemetry gauges."""

from headrace_scheduler.decisions import EndedRequest, Gauges
from headrace_scheduler.endings import Endings
from headrace_scheduler.intake import Intake
from headrace_shared import telemetry
from headrace_shared.service import Service
from headrace_shared.telemetry import Instrument

UNUSABLE = Instrument("counter", "headrace_messages_unusable_total", "Queue messages that no scheduler can read.")
DEAD = Instrument("counter", "headrace_requests_dead_total", "Requests that were given up and kept in the stream DEAD.")

MOVED = Instrument(
    "counter", "headrace_requests_moved_total", "Requests moved from a draining worker to others.", ("model",)
)


class Reporting:
    def __init__(self, service: Service, model: str, endings: Endings, intake: Intake) -> None:
        metrics = service.metrics
        self._model = model
        self._endings = endings
        self._intake = intake
        self._ended = metrics.counter(telemetry.REQUESTS)
        self._preemptions = metrics.counter(telemetry.PREEMPTIONS).labels(model)
        self._cached_tokens = metrics.counter(telemetry.CACHED_TOKENS).labels(model)
        self._running = metrics.gauge(telemetry.RUNNING).labels(model)
        self._waiting = metrics.gauge(telemetry.WAITING).labels(model)
        self._oldest_wait = metrics.gauge(telemetry.OLDEST_WAIT).labels(model)
        self._blocks_free = metrics.gauge(telemetry.BLOCKS_FREE).labels(model)
        self._blocks_referenced = metrics.gauge(telemetry.BLOCKS_REFERENCED).labels(model)
        self._blocks_awaiting = metrics.gauge(telemetry.BLOCKS_AWAITING).labels(model)
        self._moved = metrics.counter(MOVED).labels(model)
        self._unusable = metrics.counter(UNUSABLE)
        self._dead = metrics.counter(DEAD)
        self._num_dead = 0
        self._last: Gauges | None = None
        self._oldest_wait_s = 0.0
        self._num_refused = 0

    def count(self, ended: EndedRequest) -> None:
        self._ended.labels(self._model, ended.event.outcome.value).inc()

    def update(self, gauges: Gauges, oldest_wait_s: float) -> None:
        last = self._last
        self._last = gauges
        # A core that started anew counts from zero.
        is_same = last is not None and gauges.num_admissions >= last.num_admissions
        self._preemptions.inc(gauges.num_preemptions - (last.num_preemptions if last is not None and is_same else 0))
        self._moved.inc(gauges.num_moved - (last.num_moved if last is not None and is_same else 0))
        self._cached_tokens.inc(
            gauges.num_cached_tokens - (last.num_cached_tokens if last is not None and is_same else 0)
        )
        self._running.set(gauges.num_running)
        self._waiting.set(gauges.num_waiting)
        self._oldest_wait.set(oldest_wait_s)
        self._oldest_wait_s = oldest_wait_s
        workers = gauges.workers.values()
        self._blocks_free.set(sum(worker.num_free for worker in workers))
        self._blocks_referenced.set(sum(worker.num_referenced for worker in workers))
        self._blocks_awaiting.set(sum(worker.num_awaiting for worker in workers))
        self._unusable.inc(self._intake.num_refused - self._num_refused)
        self._num_refused = self._intake.num_refused
        self._dead.inc(self._endings.num_dead - self._num_dead)
        self._num_dead = self._endings.num_dead

    def gauges(self) -> dict[str, float]:
        """For Telemetry."""
        gauges = self._last
        if gauges is None:
            return {}
        workers = gauges.workers.values()
        return {
            telemetry.NUM_RUNNING: gauges.num_running,
            telemetry.NUM_WAITING: gauges.num_waiting,
            telemetry.OLDEST_WAIT_S: self._oldest_wait_s,
            telemetry.NUM_BLOCKS: sum(worker.num_blocks for worker in workers),
            telemetry.NUM_FREE_BLOCKS: sum(worker.num_free for worker in workers),
            "num_requests": gauges.num_requests,
            "num_workers": len(gauges.workers),
            "num_preemptions": gauges.num_preemptions,
            "num_losses": gauges.num_losses,
            "num_moved": gauges.num_moved,
            "num_trials": gauges.num_trials,
            "num_dead": self._endings.num_dead,
            "num_ending": self._endings.num_pending,
        }
