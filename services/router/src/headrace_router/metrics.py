"""What the router counts. Label values come from known models and our own codes only."""

import re

from headrace_router import instruments
from headrace_router.choices import Usage
from headrace_router.dashboard.journal import Journal
from headrace_shared import telemetry
from headrace_shared.aliases import ENGINE
from headrace_shared.telemetry import Metrics
from headrace_shared.tracing import PROVIDER

MAX_CODES = 200
"""Errors may come over the bus: beyond so many codes, or if it looks like none of ours, a code is `other`."""
OTHER = "other"
UNKNOWN = "unknown"
"""The model of a call that names none that is known."""
_VLLM_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "timeout": "abort", "error": "error"}
"""Calls that were rejected, or go on elsewhere, vLLM would not have counted."""
_MODEL = "gen_ai_request_model"
_CODE = re.compile(r"[a-z0-9_]{0,64}")


class RouterMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._registry = metrics
        self._codes: set[str] = set()
        self.journal = Journal()
        self._requests = metrics.counter(telemetry.REQUESTS)
        self._calls = metrics.counter(instruments.CALLS)
        self._success = metrics.counter(instruments.REQUEST_SUCCESS)
        self._refused = metrics.counter(telemetry.REQUESTS_REFUSED)
        self._in_flight = metrics.gauge(telemetry.REQUESTS_IN_FLIGHT)
        self._clients_gone = metrics.counter(telemetry.CLIENTS_GONE)
        self._client_retries = metrics.counter(instruments.CLIENT_RETRIES)
        self._prompt_tokens = metrics.counter(telemetry.PROMPT_TOKENS)
        self._cached_tokens = metrics.counter(telemetry.CACHED_TOKENS)
        self._output_tokens = metrics.counter(telemetry.OUTPUT_TOKENS)
        self._duration = metrics.histogram(telemetry.REQUEST_DURATION)
        self._first_token = metrics.histogram(telemetry.TIME_TO_FIRST_TOKEN)
        self._per_token = metrics.histogram(telemetry.TIME_PER_OUTPUT_TOKEN)
        self._http = metrics.histogram(instruments.HTTP_DURATION)
        self._prompt_length = metrics.histogram(instruments.PROMPT_LENGTH)
        self._output_length = metrics.histogram(instruments.OUTPUT_LENGTH)
        self._params_n = metrics.histogram(instruments.PARAMS_N)
        self._params_max_tokens = metrics.histogram(instruments.PARAMS_MAX_TOKENS)
        self._batch_lines = metrics.counter(instruments.BATCH_LINES)
        self.batches_running = metrics.gauge(instruments.BATCHES_RUNNING)
        self.token_gaps = metrics.tally(instruments.TOKEN_GAP)
        metrics.alias("vllm:time_to_first_token_seconds", telemetry.TIME_TO_FIRST_TOKEN, _MODEL)
        metrics.alias("vllm:request_time_per_output_token_seconds", telemetry.TIME_PER_OUTPUT_TOKEN, _MODEL)
        metrics.alias("vllm:e2e_request_latency_seconds", telemetry.REQUEST_DURATION, _MODEL)
        metrics.alias("vllm:prompt_tokens_total", telemetry.PROMPT_TOKENS)
        metrics.alias("vllm:prompt_tokens_cached_total", telemetry.CACHED_TOKENS)
        metrics.alias("vllm:generation_tokens_total", telemetry.OUTPUT_TOKENS)

    def refused(self, code: str) -> None:
        self._refused.labels(self._known(code)).inc()

    def client_gone(self) -> None:
        self._clients_gone.inc()

    def client_retry(self) -> None:
        self._client_retries.inc()

    def http_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """`route`: the path's pattern, empty if there is none."""
        self._http.labels(method, route, str(status)).observe(seconds)

    def begun(self) -> None:
        self._in_flight.inc()

    def first_token(self, operation: str, model: str, seconds: float) -> None:
        self._first_token.labels(operation, PROVIDER, model, model).observe(seconds)

    def ended(self, model: str, outcome: str, usage: Usage) -> None:
        self._in_flight.dec()
        self._requests.labels(model, self._known(outcome)).inc()
        self._prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._cached_tokens.labels(model).inc(usage.cached_tokens)
        self._output_tokens.labels(model).inc(usage.completion_tokens)

    def batch_line(self, *, is_good: bool) -> None:
        self._batch_lines.labels("completed" if is_good else "failed").inc()

    def call_ended(self, model: str, outcome: str) -> None:
        """Once for each call. `outcome`: as `instruments.CALLS` says."""
        self._calls.labels(model, outcome).inc()
        if outcome in _VLLM_REASONS:
            self._success.labels(model, ENGINE, _VLLM_REASONS[outcome]).inc()

    def asked(self, model: str, num_choices: int, max_tokens: int) -> None:
        self._params_n.labels(model, ENGINE).observe(num_choices)
        self._params_max_tokens.labels(model, ENGINE).observe(max_tokens)

    def took(
        self, operation: str, model: str, error: str, seconds: float, first_token_s: float | None, usage: Usage
    ) -> None:
        """`first_token_s`: from arrival to the first token; None if there was none."""
        labels = (operation, PROVIDER, model, model)
        self._duration.labels(*labels, self._known(error)).observe(seconds)
        self._prompt_length.labels(model, ENGINE).observe(usage.prompt_tokens)
        self._output_length.labels(model, ENGINE).observe(usage.completion_tokens)
        if first_token_s is not None and usage.completion_tokens > 1:
            self._per_token.labels(*labels).observe((seconds - first_token_s) / (usage.completion_tokens - 1))

    def _known(self, code: str) -> str:
        if code not in self._codes:
            if len(self._codes) >= MAX_CODES or _CODE.fullmatch(code) is None:
                return OTHER
            self._codes.add(code)
        return code

    def render(self) -> bytes:
        return self._registry.render()
