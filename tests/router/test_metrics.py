"""What the router counts under which labels."""

from headrace_router.choices import Usage
from headrace_router.metrics import MAX_CODES, RouterMetrics
from headrace_shared.telemetry import Metrics


def test_codes_that_come_over_the_bus_are_no_new_labels_without_end() -> None:
    metrics = RouterMetrics(Metrics())
    metrics.refused("queue_full")
    for number in range(3 * MAX_CODES):
        metrics.refused(f"invented_{number}")
        metrics.ended("m", f"invented_{number}", Usage(1, 1, 0))
        metrics.took("chat", "m", f"Invented {number}", 1.0, None, Usage(1, 1, 0))
    text = metrics.render().decode()
    assert 'headrace_requests_refused_total{code="queue_full"} 1.0' in text
    assert text.count("headrace_requests_refused_total{") <= MAX_CODES + 1
    assert text.count("headrace_requests_total{") <= MAX_CODES + 1
    assert 'error_type="other"' in text and "Invented" not in text
