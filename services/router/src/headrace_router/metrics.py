"""What the router counts. Label values come from known models and our own codes only."""

import time

from headrace_router.choices import Usage
from headrace_router.dashboard.journal import CallNote, Journal
from headrace_shared import telemetry
from headrace_shared.telemetry import Metrics


class RouterMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._registry = metrics
        self.journal = Journal()
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

    def ended(self, model: str, outcome: str, usage: Usage) -> None:
        self._in_flight.dec()
        self._requests.labels(model, outcome).inc()
        self._prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._cached_tokens.labels(model).inc(usage.cached_tokens)
        self._output_tokens.labels(model).inc(usage.completion_tokens)

    def took(self, model: str, seconds: float, first_token_s: float | None, num_tokens: int) -> None:
        """`first_token_s`: from arrival to the first token; None if there was none."""
        self._duration.labels(model).observe(seconds)
        if first_token_s is not None and num_tokens > 1:
            self._per_token.labels(model).observe((seconds - first_token_s) / (num_tokens - 1))

    def render(self) -> bytes:
        return self._registry.render()


class CallMeter:
    """Measures one call from now on."""

    def __init__(
        self, metrics: RouterMetrics, model: str, arrived_at: float, *, is_new: bool, note: CallNote | None = None
    ) -> None:
        """`is_new`: not one that is continued, whose prompt and times were counted elsewhere."""
        self._metrics = metrics
        self._model = model
        self._arrived_at = arrived_at
        self._is_new = is_new
        self._first_token_s: float | None = None
        self._note = note
        self.outcome = "cancelled"
        metrics.begun()

    def queued(self) -> None:
        if self._note is not None:
            self._note.queued_at = time.monotonic()

    def on_token(self) -> None:
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._arrived_at
            if self._is_new:
                self._metrics.first_token(self._model, self._first_token_s)
            if self._note is not None:
                self._metrics.journal.first_token(self._note, self._arrived_at + self._first_token_s)

    def ended(self, usage: Usage, num_told: int) -> None:
        """`num_told` of the answer's tokens were counted elsewhere."""
        if self._note is not None:
            self._note.end(time.monotonic(), self.outcome, usage)
        if self._is_new:
            self._metrics.ended(self._model, self.outcome, usage)
            seconds = time.monotonic() - self._arrived_at
            self._metrics.took(self._model, seconds, self._first_token_s, usage.completion_tokens)
        else:
            self._metrics.ended(self._model, self.outcome, Usage(0, max(0, usage.completion_tokens - num_told), 0))
