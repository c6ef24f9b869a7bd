"""Prompt and output apart: what iterations are made of, and how long requests spend in either."""

from headrace_shared.aliases import ENGINE
from headrace_shared.telemetry import Instrument, Metrics

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84)
_ITERATION_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_COUNTS = tuple(float(1 << power) for power in range(15))

ITERATION_SECONDS = Instrument(
    "histogram", "headrace_iteration_seconds", "Duration of an iteration.", ("model",), _ITERATION_SECONDS
)
ITERATION_SEQUENCES = Instrument(
    "histogram", "headrace_iteration_sequences", "Sequences in an iteration.", ("model",), _COUNTS[:11]
)
PREFILL_SHARE = Instrument(
    "histogram",
    "headrace_iteration_prefill_share",
    "Prompt tokens among the tokens of an iteration, 0 to 1.",
    ("model",),
    (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0),
)
ENGINE_SECONDS = Instrument(
    "counter",
    "headrace_engine_seconds_total",
    "Time in iterations; that of a mixed one is shared between prefill and decode by their tokens.",
    ("model", "phase"),
)
ITERATION_TOKENS = Instrument(
    "histogram", "vllm:iteration_tokens_total", "Tokens in an iteration.", ("model_name", "engine"), _COUNTS
)
PREFILL_TIME = Instrument(
    "histogram", "headrace_prefill_seconds", "First iteration with a sequence to its first token.", ("model",), _SECONDS
)
DECODE_TIME = Instrument(
    "histogram", "headrace_decode_seconds", "First token of a sequence to its last one.", ("model",), _SECONDS
)
INFERENCE_TIME = Instrument(
    "histogram", "headrace_inference_seconds", "First iteration of a sequence to its last token.", ("model",), _SECONDS
)


class StayMetrics:
    def __init__(self, metrics: Metrics, model: str) -> None:
        self._seconds = metrics.tally(ITERATION_SECONDS).labels(model)
        self._sequences = metrics.tally(ITERATION_SEQUENCES).labels(model)
        self._share = metrics.tally(PREFILL_SHARE).labels(model)
        self._tokens = metrics.tally(ITERATION_TOKENS).labels(model, ENGINE)
        phases = metrics.counter(ENGINE_SECONDS)
        self._prefill_s = phases.labels(model, "prefill")
        self._decode_s = phases.labels(model, "decode")
        self._prefill_time = metrics.histogram(PREFILL_TIME).labels(model)
        self._decode_time = metrics.histogram(DECODE_TIME).labels(model)
        self._inference_time = metrics.histogram(INFERENCE_TIME).labels(model)
        metrics.alias("vllm:request_prefill_time_seconds", PREFILL_TIME)
        metrics.alias("vllm:request_decode_time_seconds", DECODE_TIME)
        metrics.alias("vllm:request_inference_time_seconds", INFERENCE_TIME)

    def iteration(self, num_sequences: int, num_prefill: int, num_decode: int, elapsed_s: float) -> None:
        num_tokens = num_prefill + num_decode
        if not num_tokens:
            return
        share = num_prefill / num_tokens
        self._seconds.observe(elapsed_s)
        self._sequences.observe(num_sequences)
        self._share.observe(share)
        self._tokens.observe(num_tokens)
        if num_prefill:
            self._prefill_s.inc(share * elapsed_s)
        if num_decode:
            self._decode_s.inc((1.0 - share) * elapsed_s)

    def over(self, started_at: float | None, first_token_at: float | None, ended_at: float) -> None:
        """A sequence that came to its end; stopped ones say nothing about how long the work takes."""
        if started_at is None or first_token_at is None:
            return
        self._prefill_time.observe(first_token_at - started_at)
        self._decode_time.observe(ended_at - first_token_at)
        self._inference_time.observe(ended_at - started_at)
