"""The scheduler's figures: Prometheus metrics and Telemetry gauges."""

from headrace_scheduler.backlog_watch import BacklogWatch
from headrace_scheduler.decisions import EndedRequest, Gauges
from headrace_scheduler.endings import Endings
from headrace_scheduler.intake import Intake
from headrace_shared import telemetry
from headrace_shared.aliases import ENGINE
from headrace_shared.service import Service
from headrace_shared.telemetry import Instrument

UNUSABLE = Instrument("counter", "headrace_messages_unusable_total", "Queue messages that no scheduler can read.")
DEAD = Instrument("counter", "headrace_requests_dead_total", "Requests that were given up and kept in the stream DEAD.")
# Beyond a minute it is no latency any more but a backlog.
_WAITS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0)
QUEUE_TIME = Instrument(
    "histogram",
    "headrace_queue_time_seconds",
    "Stored until first granted to a worker.",
    ("model",),
    _WAITS,
)
KNOWN_TOKENS = Instrument(
    "counter", "headrace_placed_tokens_total", "Tokens known at each placement: prompt and earlier output.", ("model",)
)
MIGRATIONS = Instrument(
    "counter", "headrace_migrations_total", "Requests whose worker was lost, or dropped them.", ("model",)
)
WORKERS = Instrument("gauge", "headrace_workers_leased", "Workers whose lease this scheduler holds.", ("model",))
ADOPTIONS = Instrument(
    "counter", "headrace_adoptions_total", "Workers taken over, or again after something was lost.", ("model",)
)
TRIALS = Instrument("gauge", "headrace_trials", "Workers kept for a request that is under suspicion.", ("model",))
VLLM_WAITING = Instrument(
    "gauge", "vllm:num_requests_waiting", "Requests that no worker has, queue included.", ("model_name", "engine")
)

MOVED = Instrument(
    "counter", "headrace_requests_moved_total", "Requests moved from a draining worker to others.", ("model",)
)


class Reporting:
    def __init__(self, service: Service, model: str, endings: Endings, intake: Intake, backlog: BacklogWatch) -> None:
        metrics = service.metrics
        self._model = model
        self._endings = endings
        self._intake = intake
        self._backlog = backlog
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
        self._queue_time = metrics.histogram(QUEUE_TIME).labels(model)
        self._known_tokens = metrics.counter(KNOWN_TOKENS).labels(model)
        self._migrations = metrics.counter(MIGRATIONS).labels(model)
        self._workers = metrics.gauge(WORKERS).labels(model)
        self._adoptions = metrics.counter(ADOPTIONS).labels(model)
        self._trials = metrics.gauge(TRIALS).labels(model)
        self._vllm_waiting = metrics.gauge(VLLM_WAITING).labels(model, ENGINE)
        metrics.alias("vllm:request_queue_time_seconds", QUEUE_TIME)
        metrics.alias("vllm:num_preemptions_total", telemetry.PREEMPTIONS)
        metrics.alias("vllm:prefix_cache_queries_total", KNOWN_TOKENS)
        metrics.alias("vllm:prefix_cache_hits_total", telemetry.CACHED_TOKENS)
        self._unusable = metrics.counter(UNUSABLE)
        self._dead = metrics.counter(DEAD)
        self._num_dead = 0
        self._last: Gauges | None = None
        self._oldest_wait_s = 0.0
        self._num_refused = 0

    def count(self, ended: EndedRequest) -> None:
        self._ended.labels(self._model, ended.event.outcome.value).inc()

    def adopted(self) -> None:
        """A worker, under a new epoch of its lease."""
        self._adoptions.inc()

    def placed(self, waited_s: float) -> None:
        """A request, for the first time; it waited so long since it was stored."""
        self._queue_time.observe(waited_s)

    def update(self, gauges: Gauges, oldest_wait_s: float) -> None:
        last = self._last
        self._last = gauges
        # A core that started anew counts from zero.
        is_same = last is not None and gauges.num_admissions >= last.num_admissions
        before = last if is_same else None
        for counter, value, old in (
            (self._preemptions, gauges.num_preemptions, before and before.num_preemptions),
            (self._moved, gauges.num_moved, before and before.num_moved),
            (self._migrations, gauges.num_losses, before and before.num_losses),
            (self._known_tokens, gauges.num_known_tokens, before and before.num_known_tokens),
            (self._cached_tokens, gauges.num_cached_tokens, before and before.num_cached_tokens),
        ):
            counter.inc(value - (old or 0))
        self._workers.set(len(gauges.workers))
        self._trials.set(gauges.num_trials)
        self._vllm_waiting.set(gauges.num_waiting + self._backlog.num_messages)
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
