"""Settings of `headrace simulate`: flag, HEADRACE_… variable or YAML key."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Share = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class SimulateSettings(Struct, frozen=True, kw_only=True):
    gpus: Annotated[int, Meta(ge=1, le=100_000)] = 1000
    """GPUs that there are."""
    gpu: str = "h100"
    """What they are, such as l4, a100, h100 or h200."""
    gpu_model: str = "llama-3.1-8b"
    """What runs on them."""
    gpus_per_worker: Annotated[int, Meta(ge=1, le=64)] = 1
    """GPUs that share one worker's weights."""
    bits_per_weight: Annotated[int, Meta(ge=4, le=16)] = 16
    """16, 8 or 4."""
    max_sequences: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Most sequences in one iteration of a worker."""
    tokens_per_iteration: Annotated[int, Meta(ge=16, le=1 << 20)] = 2048
    """Most tokens that one iteration computes."""
    hours: Annotated[float, Meta(gt=0, le=744)] = 24.0
    """How much of the generated day is simulated; a trace is simulated whole."""
    start_hour: Annotated[float, Meta(ge=0, lt=24)] = 0.0
    """Where in the generated day it begins."""
    peak: Annotated[float, Meta(gt=0, le=10)] = 0.8
    """Requests at the busiest moment, as a share of what all GPUs could serve."""
    steady: bool = False
    """The same rate all the time instead of a day: that of the peak."""
    trace: str = ""
    """File with requests instead of a generated day: columns TIMESTAMP,ContextTokens,GeneratedTokens, or Timestamp,
    Request tokens and Response tokens."""
    trace_weight: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Requests that each row of the trace stands for; 0: so many that the busiest minute is the peak."""
    policies: tuple[str, ...] = ("own", "own-without-pool", "fixed-peak", "fixed-mean", "lag-threshold")
    """Which are run, separated by commas."""
    detail: Literal["requests", "tokens"] = "requests"
    """requests: each request, on workers that all carry the same load; tokens: each token, block and message, with the
    scheduler's own core and the workers' own loops, for a few GPUs and minutes."""
    check: bool = False
    """Instead of policies: the same steady load in both details, at several rates, side by side."""
    step_s: Annotated[float, Meta(ge=0.05, le=5)] = 1.0
    """A step of virtual time."""
    max_requests_per_step: Annotated[int, Meta(ge=1, le=1_000_000)] = 1500
    """Of a generated day: beyond so many each simulated request stands for several."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Of everything that is drawn."""
    ttft_target_s: Annotated[float, Meta(gt=0, le=3600)] = 2.0
    """Wanted time to first token."""
    max_wait_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """The router refuses requests that are expected to wait longer for their first token; 0: it refuses none."""
    cold_start_s: Seconds = 90.0
    """Until a new worker is ready: container, weights, recorded graphs."""
    promotion_s: Seconds = 1.0
    """Until a parked worker is ready."""
    drain_s: Seconds = 10.0
    """Until the GPU of a worker that goes is free."""
    period_s: Annotated[float, Meta(ge=0.1, le=3600)] = 5.0
    """Between two decisions of a policy."""
    target_load: Share = 0.95
    """Own policy: share of a worker's capacity that is planned with."""
    scale_down_after_s: Seconds = 300.0
    """Own policy: so long must less be enough before there is less."""
    min_parked: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Own policy: least workers in the warm pool."""
    max_parked: Annotated[int, Meta(ge=0, le=100_000)] = 50
    """Own policy: most workers in the warm pool."""
    lag_threshold: Annotated[float, Meta(ge=0)] = 0.0
    """Policy lag-threshold: messages for one worker; 0: the sequences that run on a fully used one."""
    fixed_load: Share = 0.95
    """Policies fixed-peak and fixed-mean: how full the workers are at the busiest minute, or on average."""
    cost_per_gpu_hour: Annotated[float, Meta(ge=0)] = 1.0
    """For the report."""
    out: str = ""
    """Folder for report.json and the plots; empty: only a table on the screen."""
    plots: Literal["auto", "svg", "png", "both", "none"] = "auto"
    """Kinds of plots; auto: both if matplotlib is installed."""
