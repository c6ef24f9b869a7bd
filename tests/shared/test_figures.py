"""Figures of others, who may be wrong."""

import pytest

from headrace_shared.codec import encode
from headrace_shared.errors import ProtocolError
from headrace_shared.figures import MAX_FIGURE, read_figures
from headrace_shared.fleet_messages import Telemetry


def test_what_nobody_can_count_with_is_left_out() -> None:
    wrong = {"nan": float("nan"), "inf": float("inf"), "minus": float("-inf"), "huge": 2 * MAX_FIGURE}
    told = Telemetry(service="worker", id="w", state="ready", gauges={"busy": 1.5, "none": 0.0, **wrong})
    assert read_figures(encode(told)).gauges == {"busy": 1.5, "none": 0.0}
    sane = Telemetry(service="worker", id="w", state="ready", gauges={"busy": -1.5})
    assert read_figures(encode(sane)) == sane
    with pytest.raises(ProtocolError):
        read_figures(b"\xc1")
