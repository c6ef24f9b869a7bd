"""The worker's figures: Prometheus metrics and Telemetry gauges."""

from collections.abc import Callable

from headrace_shared import telemetry
from headrace_shared.aliases import ENGINE
from headrace_shared.telemetry import Instrument, Metrics
from headrace_worker.engine_frames import Loaded
from headrace_worker.session import Session

KV_USAGE = Instrument("gauge", "headrace_kv_cache_usage_ratio", "KV blocks that sequences hold, 0 to 1.", ("model",))
CACHE_CONFIG = Instrument(
    "gauge",
    "vllm:cache_config_info",
    "Always 1; the labels tell about the KV cache.",
    ("model_name", "engine", "block_size", "num_gpu_blocks", "cache_dtype"),
)


class Reporting:
    """Of a worker whose engine is loaded."""

    def __init__(
        self,
        metrics: Metrics,
        facts: Loaded,
        session: Session,
        clock: Callable[[], float],
        memory: Callable[[], dict[int, tuple[int, int]]],
        gpus: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """`memory`: bytes in main memory and on the GPU, by rank, of an engine of several ranks. `gpus`: gauges."""
        model = facts.card.model
        self._facts = facts
        self._session = session
        self._clock = clock
        self._memory = memory
        self._gpus = gpus
        self._counted_at = clock()
        self._num_iterations = 0
        self._num_prefilled = 0
        self._num_output_tokens = 0
        self._running = metrics.gauge(telemetry.RUNNING).labels(model)
        self._stalled = metrics.gauge(telemetry.STALLED).labels(model)
        self._blocks_free = metrics.gauge(telemetry.BLOCKS_FREE).labels(model)
        self._blocks_held = metrics.gauge(telemetry.BLOCKS_REFERENCED).labels(model)
        self._iterations = metrics.counter(telemetry.ITERATIONS).labels(model)
        self._prefill_tokens = metrics.counter(telemetry.PREFILL_TOKENS).labels(model)
        self._decode_tokens = metrics.counter(telemetry.DECODE_TOKENS).labels(model)
        metrics.gauge(telemetry.BLOCKS).labels(model).set(facts.num_blocks)
        self._kv_usage = metrics.gauge(KV_USAGE).labels(model)
        config = (str(facts.block_size), str(facts.num_blocks), facts.dtype)
        metrics.gauge(CACHE_CONFIG).labels(model, ENGINE, *config).set(1)
        metrics.alias("vllm:num_requests_running", telemetry.RUNNING)
        metrics.alias("vllm:kv_cache_usage_perc", KV_USAGE)

    def gauges(self) -> dict[str, float]:
        """For Telemetry, once a second; also brings the metrics up to date."""
        facts, session = self._facts, self._session
        mirror = session.mirror
        now = self._clock()
        num_new = session.num_output_tokens - self._num_output_tokens
        tokens_per_s = num_new / max(now - self._counted_at, 1e-3)
        num_running, num_stalled, num_held = mirror.num_sequences, mirror.num_stalled, mirror.num_blocks_held
        self._running.set(num_running)
        self._stalled.set(num_stalled)
        self._blocks_held.set(num_held)
        self._blocks_free.set(facts.num_blocks - num_held)
        self._kv_usage.set(num_held / facts.num_blocks)
        self._iterations.inc(session.num_iterations - self._num_iterations)
        self._prefill_tokens.inc(session.num_prefilled - self._num_prefilled)
        self._decode_tokens.inc(num_new)
        self._counted_at = now
        self._num_iterations = session.num_iterations
        self._num_prefilled = session.num_prefilled
        self._num_output_tokens = session.num_output_tokens
        return {
            telemetry.NUM_RUNNING: num_running,
            telemetry.NUM_BLOCKS: facts.num_blocks,
            telemetry.NUM_FREE_BLOCKS: facts.num_blocks - num_held,
            telemetry.TOKENS_PER_S: tokens_per_s,
            telemetry.IS_CUDA: float(facts.device.startswith("cuda")),
            telemetry.NUM_OUTPUT_TOKENS: session.num_output_tokens,
            telemetry.NUM_PREFILL_TOKENS: session.num_prefilled,
            telemetry.NUM_ITERATIONS: session.num_iterations,
            telemetry.BUSY_S: session.busy_s,
            **self._gpus(),
            "num_stalled": num_stalled,
            "batch_occupancy": min(1.0, num_running / facts.max_sequences),
            **self._rank_gauges(),
        }

    def _rank_gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = {}
        for rank, (memory_bytes, device_bytes) in self._memory().items():
            gauges[f"rank_{rank}_memory_bytes"] = memory_bytes
            gauges[f"rank_{rank}_device_bytes"] = device_bytes
        return gauges
