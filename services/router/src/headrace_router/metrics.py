"""What the router counts. Label values come from known models and our own codes only."""

from headrace_router.choices import Usage
from headrace_shared import telemetry
from headrace_shared.telemetry import Metrics


class RouterMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._registry = metrics
        self._requests = metrics.counter(telemetry.REQUESTS)
        self._refused = metrics.counter(telemetry.REQUESTS_REFUSED)
        self._in_flight = metrics.gauge(telemetry.REQUESTS_IN_FLIGHT)
        self._clients_gone = metrics.counter(telemetry.CLIENTS_GONE)
        self._prompt_tokens = metrics.counter(telemetry.PROMPT_TOKENS)
        self._cached_tokens = metrics.counter(telemetry.CACHED_TOKENS)
        self._output_tokens = metrics.counter(telemetry.OUTPUT_TOKENS)
        self._duration = metrics.histogram(telemetry.REQUEST_DURATION)
        self._first_token = metrics.histogram(telemetry.TIME_TO_FIRST_TOKEN)
        self._per_token = metrics.histogram(telemetry.TIME_PER_OUTPUT_TOKEN)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def client_gone(self) -> None:
        self._clients_gone.inc()

    def begun(self) -> None:
        self._in_flight.inc()

    def first_token(self, model: str, seconds: float) -> None:
        self._first_token.labels(model).observe(seconds)

    def ended(self, model: str, outcome: str, usage: Usage, seconds: float, first_token_s: float | None) -> None:
        """`first_token_s`: from arrival to the first token; None if there was none."""
        self._in_flight.dec()
        self._requests.labels(model, outcome).inc()
        self._duration.labels(model).observe(seconds)
        self._prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._cached_tokens.labels(model).inc(usage.cached_tokens)
        self._output_tokens.labels(model).inc(usage.completion_tokens)
        if first_token_s is not None and usage.completion_tokens > 1:
            self._per_token.labels(model).observe((seconds - first_token_s) / (usage.completion_tokens - 1))

    def render(self) -> bytes:
        return self._registry.render()
