"""What serves the requests in virtual time: the seam between the fleet's day and how workers are modelled."""

from typing import NamedTuple, Protocol

from headrace_shared.engine_speed import Work
from headrace_simulator.arrivals import Arrivals, Floats


class Step(NamedTuple):
    """What one step brought about. All counts are in simulated requests, not multiplied by the traffic's weight."""

    ttft_s: Floats
    """Times to first token of the requests that got theirs, or are certain to get it then."""
    num_finished: int


class Load(NamedTuple):
    """The present state, for the autoscaler and the report, in simulated requests."""

    num_waiting: int
    """Requests that no worker has."""
    num_running: int
    num_waiting_tokens: int
    oldest_wait_s: float
    kv_use: float
    """Share of the ready workers' KV blocks that sequences hold."""
    batch_occupancy: float
    """Share of the places in the ready workers' iterations that are taken."""
    spent: Work
    """By an average ready worker in the last step."""
    utilization: float
    """Share of the last step in which the ready workers' GPUs computed."""


class Cluster(Protocol):
    def step(self, now: float, num_ready: int, arrivals: Arrivals) -> Step:
        """Serves for one step from `now` on with so many ready workers."""
        ...

    def load(self, now: float) -> Load: ...
