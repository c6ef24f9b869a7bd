"""What a router tells once a second of the whole fleet: to the live page and to `headrace top`."""

from msgspec import Struct


class RouterFrame(Struct, frozen=True, kw_only=True):
    id: str
    state: str
    in_flight: int = 0
    requests_per_s: float = 0.0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None


class QueueFrame(Struct, frozen=True, kw_only=True):
    model: str
    waiting: int | None = None
    """Not taken by any scheduler yet; None if the broker did not say."""
    taken: int | None = None


class SchedulerFrame(Struct, frozen=True, kw_only=True):
    id: str
    model: str = ""
    state: str = ""
    waiting: int = 0
    running: int = 0
    oldest_wait_s: float = 0.0
    preemptions: int = 0
    losses: int = 0


class WorkerFrame(Struct, frozen=True, kw_only=True):
    id: str
    model: str = ""
    state: str = ""
    running: int = 0
    stalled: int = 0
    max_sequences: int = 0
    blocks: int = 0
    blocks_held: int = 0
    tokens_per_s: float = 0.0
    prefill_per_s: float = 0.0
    is_cuda: bool = False


class ScalingFrame(Struct, frozen=True, kw_only=True):
    """What the autoscaler wants of one model."""

    model: str
    desired: int = 0
    most: int | None = None
    coming: int = 0
    coming_in_s: float | None = None


class AutoscalerFrame(Struct, frozen=True, kw_only=True):
    id: str
    state: str = ""
    is_leader: bool = True
    models: list[ScalingFrame] = []


class OverflowFrame(Struct, frozen=True, kw_only=True):
    model: str
    num_requests: int
    """Sent there since the routers started."""


class Totals(Struct, frozen=True, kw_only=True):
    """What the plots show."""

    queue: int | None = None
    """Requests that no worker has yet: in the stream, and in the schedulers' windows."""
    in_flight: int = 0
    running: int = 0
    tokens_per_s: float = 0.0
    prefill_per_s: float = 0.0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    batch: float = 0.0
    """Sequences running, as a share of what the ready workers take in one iteration."""
    kv: float = 0.0
    """KV blocks held, as a share of all."""
    ready: int = 0
    starting: int = 0
    parked: int = 0
    draining: int = 0
    desired: int | None = None


class Frame(Struct, frozen=True, kw_only=True):
    """Of each kind of part the first ones only, so that its size is bounded."""

    seq: int = 0
    at: float
    """Seconds since the epoch."""
    totals: Totals
    routers: list[RouterFrame] = []
    queues: list[QueueFrame] = []
    schedulers: list[SchedulerFrame] = []
    workers: list[WorkerFrame] = []
    num_workers: int = 0
    autoscalers: list[AutoscalerFrame] = []
    overflows: list[OverflowFrame] = []
