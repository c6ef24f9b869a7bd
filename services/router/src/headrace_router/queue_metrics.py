"""What the router counts about waiting, refusing and overflowing."""

from collections.abc import Iterable

from headrace_router.model_queue import Observed
from headrace_shared.telemetry import OVERFLOWED_OF, Instrument, Metrics, of_model

WAIT_ERROR = Instrument(
    "histogram",
    "headrace_router_wait_error_ratio",
    "Relative error of the predicted time to the first token, where that is half a second or more.",
    ("model",),
    (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0),
)
_WAITS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
WAIT_PREDICTED = Instrument(
    "histogram",
    "headrace_router_wait_predicted_seconds",
    "Their predicted time to the first token.",
    ("model",),
    _WAITS,
)
WAIT_ACTUAL = Instrument(
    "histogram", "headrace_router_wait_actual_seconds", "Their true time to the first token.", ("model",), _WAITS
)
WAIT_CORRECTION = Instrument(
    "gauge", "headrace_router_wait_correction_ratio", "Factor by which predictions are corrected now.", ("model",)
)
SHED = Instrument("counter", "headrace_router_shed_total", "Calls refused at the door by reason.", ("model", "reason"))
OVERFLOWED = Instrument(
    "counter", "headrace_router_overflow_total", "Calls that a smaller model answered.", ("model", "answered_by")
)
PROMISES = Instrument(
    "counter",
    "headrace_router_promises_total",
    "Clients that came back when they were told to, by whether they got in.",
    ("model", "outcome"),
)


class QueueMetrics:
    """Models are names of models that there are."""

    def __init__(self, metrics: Metrics) -> None:
        self._error = metrics.histogram(WAIT_ERROR)
        self._predicted = metrics.histogram(WAIT_PREDICTED)
        self._actual = metrics.histogram(WAIT_ACTUAL)
        self._correction = metrics.gauge(WAIT_CORRECTION)
        self._shed = metrics.counter(SHED)
        self._overflowed = metrics.counter(OVERFLOWED)
        self._num_answered_by: dict[str, int] = {}
        self._promises = metrics.counter(PROMISES)

    def observed(self, model: str, observed: Observed, factor: float) -> None:
        self._error.labels(model).observe(observed.error)
        self._predicted.labels(model).observe(observed.predicted_s)
        self._actual.labels(model).observe(observed.actual_s)
        self._correction.labels(model).set(factor)

    def refused(self, model: str, reason: str) -> None:
        self._shed.labels(model, reason).inc()

    def overflowed(self, model: str, answered_by: str) -> None:
        self._overflowed.labels(model, answered_by).inc()
        self._num_answered_by[answered_by] = self._num_answered_by.get(answered_by, 0) + 1

    def overflow_gauges(self, smaller: Iterable[str]) -> dict[str, float]:
        """For Telemetry: how many requests each of the smaller models has answered instead of a larger one."""
        return {of_model(OVERFLOWED_OF, model): float(self._num_answered_by.get(model, 0)) for model in smaller}

    def promise(self, model: str, outcome: str) -> None:
        self._promises.labels(model, outcome).inc()
