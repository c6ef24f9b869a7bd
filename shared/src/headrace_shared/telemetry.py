"""Names of what the services tell about themselves, and the registry that a service counts in."""

from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headrace_shared.aliases import Alias, Aliases
from headrace_shared.tally import Tallies

# Gauges of Telemetry messages.
LOADING_CURRENT = "loading_current"
"""Bytes or steps of model loading done."""
LOADING_TOTAL = "loading_total"
"""Bytes or steps of model loading in all."""
NUM_RUNNING = "num_running"
"""Sequences on the worker."""
NUM_WAITING = "num_waiting"
"""Requests in a scheduler's window that no worker has yet."""
OLDEST_WAIT_S = "oldest_wait_s"
"""Longest time that one of them has waited there."""
NUM_BLOCKS = "num_blocks"
NUM_FREE_BLOCKS = "num_free_blocks"
TOKENS_PER_S = "tokens_per_s"
"""Output tokens over the last second."""
NUM_PREFILL_TOKENS = "num_prefill_tokens"
"""Prompt tokens that a worker has computed since its start."""
NUM_OUTPUT_TOKENS = "num_output_tokens"
"""Tokens that a worker has sampled since its start."""
NUM_ITERATIONS = "num_iterations"
"""Of a worker's engine since its start."""
BUSY_S = "busy_s"
"""Seconds that a worker has spent in iterations since its start."""
NUM_IN_FLIGHT = "num_in_flight"
"""Requests whose client is waiting at a router."""
GPU_UTILIZATION = "gpu_utilization"
"""Mean over a worker's own GPUs, 0 to 1, where the driver tells."""
IS_CUDA = "is_cuda"
"""1 on a GPU, 0 on a CPU."""
HEALTH_PORT = "health_port"
"""Where /live, /health and /metrics answer; part of every service's report."""

STARTED_AT = "started_at"
"""When the process was started, in seconds since the epoch by its own clock; part of every service's report."""

# Gauges of one model: the name, a colon, the model (`of_model`). The first four come from the autoscaler that acts.
MAX_WORKERS_OF = "max_workers"
"""Most workers that may be started. At least 1: the model can be woken."""
COMING_WORKERS_OF = "coming_workers"
"""Started or being unparked, and not ready yet."""
COMING_IN_S_OF = "coming_in_s"
"""Expected seconds until the first of them is ready."""
START_S_OF = "start_s"
"""Expected seconds from a queued request to a ready worker while there is none."""
WANTED_OF = "wanted"
"""Calls that a router holds because nobody has shown it the model's card yet."""
TTFT_P95_OF = "ttft_p95_s"
"""Of the answers that began in about the last 30 s at a router."""
OVERFLOWED_OF = "overflowed"
"""Requests that a router has sent to this model instead of a larger one since its start."""
WAITING_TOKENS_OF = "waiting_tokens"
"""Prompt tokens of a router's requests that have no token yet."""


def of_model(gauge: str, model: str) -> str:
    return f"{gauge}:{model}"


class Instrument(NamedTuple):
    """A Prometheus metric: what it is called, not its values."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_DURATIONS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

REQUESTS = Instrument("counter", "headrace_requests_total", "Requests by outcome.", ("model", "outcome"))
REQUESTS_REFUSED = Instrument("counter", "headrace_requests_refused_total", "Requests refused by code.", ("code",))
REQUESTS_IN_FLIGHT = Instrument("gauge", "headrace_requests_inflight", "Requests whose client is waiting.")
CLIENTS_GONE = Instrument("counter", "headrace_clients_gone_total", "Requests whose client went away first.")
PROMPT_TOKENS = Instrument("counter", "headrace_prompt_tokens_total", "Prompt tokens.", ("model",))
CACHED_TOKENS = Instrument(
    "counter", "headrace_cached_tokens_total", "Prompt tokens from the prefix cache.", ("model",)
)
OUTPUT_TOKENS = Instrument("counter", "headrace_output_tokens_total", "Generated tokens.", ("model",))
# Names, labels and buckets of the next three: OpenTelemetry's conventions for generative AI servers.
GEN_AI_LABELS = (
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_request_model",
    "gen_ai_response_model",
)
REQUEST_DURATION = Instrument(
    "histogram",
    "gen_ai_server_request_duration_seconds",
    "Arrival to last token; error_type is empty where all went well.",
    (*GEN_AI_LABELS, "error_type"),
    _DURATIONS,
)
TIME_TO_FIRST_TOKEN = Instrument(
    "histogram", "gen_ai_server_time_to_first_token_seconds", "Arrival to first token.", GEN_AI_LABELS, _FIRST_TOKEN
)
TIME_PER_OUTPUT_TOKEN = Instrument(
    "histogram", "gen_ai_server_time_per_output_token_seconds", "Time per later token.", GEN_AI_LABELS, _PER_TOKEN
)
PREEMPTIONS = Instrument(
    "counter", "headrace_preemptions_total", "Sequences taken back for want of blocks.", ("model",)
)
RUNNING = Instrument("gauge", "headrace_sequences_running", "Sequences on workers.", ("model",))
WAITING = Instrument("gauge", "headrace_requests_waiting", "Requests in the waiting window.", ("model",))
OLDEST_WAIT = Instrument(
    "gauge", "headrace_oldest_waiting_seconds", "Longest time that a sequence has waited for a worker.", ("model",)
)
BLOCKS = Instrument("gauge", "headrace_blocks", "KV blocks.", ("model",))
BLOCKS_FREE = Instrument("gauge", "headrace_blocks_free", "KV blocks that nobody holds.", ("model",))
BLOCKS_REFERENCED = Instrument("gauge", "headrace_blocks_referenced", "KV blocks that sequences hold.", ("model",))
BLOCKS_AWAITING = Instrument(
    "gauge", "headrace_blocks_awaiting", "KV blocks not yet confirmed as released.", ("model",)
)
ASYNCIO_TASKS = Instrument("gauge", "headrace_asyncio_tasks", "Tasks of the event loop.")
STALLED = Instrument(
    "gauge", "headrace_sequences_stalled", "Sequences without a block for their next token.", ("model",)
)
ITERATIONS = Instrument("counter", "headrace_iterations_total", "Iterations of the engine.", ("model",))
PREFILL_TOKENS = Instrument(
    "counter", "headrace_prefill_tokens_total", "Prompt tokens computed, again after a preemption too.", ("model",)
)
DECODE_TOKENS = Instrument("counter", "headrace_decode_tokens_total", "Tokens sampled.", ("model",))


class Metrics:
    """A service's metrics, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self._tallies: dict[str, Tallies] = {}
        self._aliases: list[Alias] = []
        self.registry.register(Aliases(lambda: self._aliases))

    def counter(self, instrument: Instrument) -> Counter:
        made = self._get(instrument)
        assert isinstance(made, Counter), instrument
        return made

    def gauge(self, instrument: Instrument) -> Gauge:
        made = self._get(instrument)
        assert isinstance(made, Gauge), instrument
        return made

    def histogram(self, instrument: Instrument) -> Histogram:
        made = self._get(instrument)
        assert isinstance(made, Histogram), instrument
        return made

    def tally(self, instrument: Instrument) -> Tallies:
        """A histogram that costs next to nothing to observe, for one thread."""
        made = self._tallies.get(instrument.name)
        if made is None:
            made = Tallies(instrument.name, instrument.help, instrument.labels, instrument.buckets)
            self.registry.register(made)
            self._tallies[instrument.name] = made
        return made

    def alias(self, name: str, instrument: Instrument, model_label: str = "model") -> None:
        """Shows the instrument under another name too, with vLLM's labels model_name (from `model_label`) and engine;
        values that other labels tell apart are added up."""
        self._aliases.append(Alias(name.removesuffix("_total"), self._get(instrument), model_label))

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)

    def _get(self, instrument: Instrument) -> Counter | Gauge | Histogram:
        if instrument.name not in self._made:
            self._made[instrument.name] = _make(instrument, self.registry)
        return self._made[instrument.name]


def _make(instrument: Instrument, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    name, text, labels = instrument.name, instrument.help, instrument.labels
    if instrument.kind == "counter":
        return Counter(name, text, labels, registry=registry)
    if instrument.kind == "gauge":
        return Gauge(name, text, labels, registry=registry)
    return Histogram(name, text, labels, registry=registry, buckets=instrument.buckets)


METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
