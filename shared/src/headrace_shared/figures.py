"""Reading what services tell of themselves in numbers. Pure."""

from math import isfinite

from msgspec.structs import replace

from headrace_shared.codec import decode
from headrace_shared.fleet_messages import Telemetry

MAX_FIGURE = 1e15
"""Above any count of ours. Sums and products of such numbers stay finite."""


def read_figures(data: bytes) -> Telemetry:
    """Without gauges that nobody can count with: what is no number spreads to all that it is added to, stays there, and
    ends whoever rounds it. Raises ProtocolError."""
    told = decode(data, Telemetry)
    gauges = {name: value for name, value in told.gauges.items() if isfinite(value) and abs(value) <= MAX_FIGURE}
    return told if len(gauges) == len(told.gauges) else replace(told, gauges=gauges)
