"""What a router tells of the whole fleet once a second, as far as it is shown."""

import msgspec
from msgspec import Struct


class Totals(Struct, frozen=True, kw_only=True):
    queue: int | None = None
    in_flight: int = 0
    running: int = 0
    tokens_per_s: float = 0.0
    prefill_per_s: float = 0.0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    batch: float = 0.0
    """Share, 0 to 1; `kv` too."""
    kv: float = 0.0
    ready: int = 0
    starting: int = 0
    parked: int = 0
    draining: int = 0
    desired: int | None = None


class Router(Struct, frozen=True, kw_only=True):
    id: str
    state: str
    in_flight: int = 0
    requests_per_s: float = 0.0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None


class Queue(Struct, frozen=True, kw_only=True):
    model: str
    waiting: int | None = None
    taken: int | None = None


class Scheduler(Struct, frozen=True, kw_only=True):
    id: str
    model: str = ""
    state: str = ""
    waiting: int = 0
    running: int = 0
    oldest_wait_s: float = 0.0
    preemptions: int = 0
    losses: int = 0


class Worker(Struct, frozen=True, kw_only=True):
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


class Scaling(Struct, frozen=True, kw_only=True):
    model: str
    desired: int = 0
    most: int | None = None
    coming: int = 0
    coming_in_s: float | None = None


class Autoscaler(Struct, frozen=True, kw_only=True):
    id: str
    state: str = ""
    is_leader: bool = True
    models: list[Scaling] = []


class Frame(Struct, frozen=True, kw_only=True):
    at: float
    """Seconds since the epoch."""
    totals: Totals
    routers: list[Router] = []
    queues: list[Queue] = []
    schedulers: list[Scheduler] = []
    workers: list[Worker] = []
    """The first of them."""
    num_workers: int = 0
    autoscalers: list[Autoscaler] = []


class Columns(Struct, frozen=True, kw_only=True):
    """The past, a value a second."""

    queue: list[int | None] = []
    tokens_per_s: list[float] = []


class Past(Struct, frozen=True, kw_only=True):
    columns: Columns = Columns()


decode_frame = msgspec.json.Decoder(Frame).decode
decode_past = msgspec.json.Decoder(Past).decode
