"""What the policy is told of one model at one moment. Pure data."""

from typing import NamedTuple


class Observation(NamedTuple):
    """A figure that could not be read is None, which is never taken for zero."""

    num_ready: int
    """Workers that take requests."""
    num_waiting: int | None = 0
    """Requests that no worker has: in the queue, or in a scheduler's window."""
    num_running: int | None = 0
    """Requests that were taken from the queue and not yet ended, without those that wait in a window."""
    worker_capacity: int = 0
    """Sequences that one worker runs at a time; 0: not known yet."""
    num_starting: int = 0
    """Workers that are on their way: being started, loading, or being promoted."""
    num_parked: int = 0
    """Workers of the warm pool: loaded, but taking no requests."""
    num_arrived: int | None = None
    """Requests that ever came. Only differences count; a number that falls has started anew."""
    oldest_wait_s: float = 0.0
    """Longest time that a request has waited for a worker."""
    num_waiting_tokens: int = 0
    """Prompt tokens of the requests that wait; 0: not known."""
    worker_tokens_per_s: float = 0.0
    """Prompt tokens that one worker computes a second at its best; 0: not known."""
    kv_use: float | None = None
    """Share of the KV blocks of the ready workers that sequences hold, 0 to 1."""
    batch_occupancy: float | None = None
    """Share of the places in the ready workers' iterations that are taken, 0 to 1."""
    gpu_utilization: float | None = None
    """Share of the time in which the ready workers' GPUs computed anything, 0 to 1; None: no GPU, or no NVML."""
    ttft_s: float | None = None
    """A high percentile of the times to first token since the last observation or so; None: no request was answered."""
    load: float | None = None
    """Share that the ready workers do now of what they could do with full batches, on average: 1 is all. It does not
    depend on how long requests take, which itself depends on the load. None: not known."""
    warm_up_s: float = 0.0
    """From the start of a worker to its being ready; 0: not known."""

    @property
    def num_workers(self) -> int:
        """Those on their way count."""
        return self.num_ready + self.num_starting
