"""From settings to what is simulated: the kind of worker, the traffic, and each policy's scaler. Pure."""

from math import ceil
from typing import NamedTuple

from headrace_autoscaler.policy import Limits
from headrace_scheduler.decisions import WorkerFacts
from headrace_shared.errors import ConfigError
from headrace_simulator.arrivals import Traffic
from headrace_simulator.cluster import Cluster
from headrace_simulator.diurnal import MAX_ANSWER, MEAN_ANSWER, MEAN_PROMPT, Day
from headrace_simulator.fleet import Times
from headrace_simulator.gates import Gate, Open, RouterGate
from headrace_simulator.mean_field import MeanField
from headrace_simulator.scalers import Fixed, LagThreshold, OwnPolicy, Scaler
from headrace_simulator.settings import SimulateSettings
from headrace_simulator.simulation import Frame
from headrace_simulator.token_level import TokenLevel
from headrace_simulator.traces import read_trace, scaled
from headrace_simulator.workers import FULL, WorkerKind
from headrace_worker.timing.hardware import find_gpu
from headrace_worker.timing.roofline import Roofline
from headrace_worker.timing.shapes import find_shape

BLOCK_SIZE = 16
MEMORY_SHARE = 0.9
MINUTE_S = 60.0
POLICIES = ("own", "own-without-pool", "fixed-peak", "fixed-mean", "lag-threshold")


class Plan(NamedTuple):
    frame: Frame
    capacity: float
    """Requests a second that one worker serves when it is fully used."""
    mean_prompt: float
    mean_answer: float
    max_answer: int


def make_kind(settings: SimulateSettings) -> WorkerKind:
    """Raises ConfigError for hardware that is not known or too small."""
    roofline = Roofline(
        find_gpu(settings.gpu), find_shape(settings.gpu_model), settings.gpus_per_worker, settings.bits_per_weight
    )
    num_blocks = roofline.num_blocks(BLOCK_SIZE, MEMORY_SHARE)
    context = min(roofline.shape.context, num_blocks * BLOCK_SIZE)
    facts = WorkerFacts(num_blocks, BLOCK_SIZE, context, settings.max_sequences, settings.tokens_per_iteration)
    return WorkerKind(roofline, facts)


def make_plan(settings: SimulateSettings) -> Plan:
    """Reads the trace, if there is one. Raises ConfigError."""
    unknown = [name for name in settings.policies if name not in POLICIES]
    if unknown or not settings.policies:
        raise ConfigError("policies", f"{', '.join(unknown) or 'nothing'} is none of {', '.join(POLICIES)}")
    if settings.bits_per_weight not in (4, 8, 16):
        raise ConfigError("bits_per_weight", "must be 16, 8 or 4")
    kind = make_kind(settings)
    max_workers = settings.gpus // settings.gpus_per_worker
    if not max_workers:
        raise ConfigError("gpus", f"fewer than the {settings.gpus_per_worker} of one worker")
    make = _trace if settings.trace else _day
    traffic, (mean_prompt, mean_answer), max_answer = make(settings, kind, max_workers)
    capacity = kind.capacity(mean_prompt, mean_answer)
    if settings.detail == "tokens" and traffic.weight > 1:
        raise ConfigError("detail", "tokens: too much load to simulate each; fewer gpus, or more max-requests-per-step")
    first_rate = traffic.rate(0)
    frame = Frame(
        kind=kind,
        traffic=traffic,
        step_s=settings.step_s,
        period_s=settings.period_s,
        times=Times(settings.cold_start_s, settings.promotion_s, settings.drain_s),
        max_workers=max_workers,
        num_first=min(max_workers, max(1, ceil(first_rate / (capacity * settings.target_load)))),
        target_s=settings.ttft_target_s,
        cost_per_worker_hour=settings.cost_per_gpu_hour * settings.gpus_per_worker,
    )
    return Plan(frame, capacity, mean_prompt, mean_answer, max_answer)


def make_cluster(settings: SimulateSettings, plan: Plan) -> Cluster:
    frame = plan.frame
    if settings.detail == "tokens":
        return TokenLevel(frame.kind, step_s=settings.step_s, seed=settings.seed)
    return MeanField(
        frame.kind,
        step_s=settings.step_s,
        weight=frame.traffic.weight,
        max_answer=plan.max_answer,
        seed=settings.seed,
    )


def make_scaler(settings: SimulateSettings, plan: Plan, policy: str) -> tuple[Scaler, int]:
    """And how many workers there are at the start. What is fixed is chosen by who knew the day before."""
    frame = plan.frame
    if policy.startswith("fixed"):
        rates = minute_rates(frame.traffic, settings.step_s)
        rate = max(rates) if policy == "fixed-peak" else sum(rates) / len(rates)
        count = min(frame.max_workers, max(1, ceil(rate / (plan.capacity * settings.fixed_load))))
        return Fixed(count), count
    if policy == "lag-threshold":
        threshold = settings.lag_threshold or FULL * settings.max_sequences
        return LagThreshold(threshold, 1, frame.max_workers), frame.num_first
    limits = Limits(
        min_workers=1,
        max_workers=frame.max_workers,
        scale_down_after_s=settings.scale_down_after_s,
        ttft_target_s=settings.ttft_target_s,
        target_load=settings.target_load,
        min_parked=settings.min_parked if policy == "own" else 0,
        max_parked=settings.max_parked if policy == "own" else 0,
        cost_per_worker_hour=frame.cost_per_worker_hour,
    )
    return OwnPolicy(limits), frame.num_first


def minute_rates(traffic: Traffic, step_s: float) -> list[float]:
    """Requests a second, expected, minute by minute."""
    width = max(1, round(MINUTE_S / step_s))
    rates = [traffic.rate(step) for step in range(traffic.num_steps)]
    parts = [rates[start : start + width] for start in range(0, len(rates), width)]
    return [sum(part) / len(part) for part in parts]


def make_gate(settings: SimulateSettings, plan: Plan) -> Gate:
    if not settings.max_wait_s:
        return Open()
    return RouterGate(
        plan.frame.kind,
        mean_prompt=plan.mean_prompt,
        mean_answer=plan.mean_answer,
        weight=plan.frame.traffic.weight,
        max_wait_s=settings.max_wait_s,
    )


def _day(settings: SimulateSettings, kind: WorkerKind, max_workers: int) -> tuple[Traffic, tuple[float, float], int]:
    day = Day(
        settings.peak * max_workers * kind.capacity(MEAN_PROMPT, MEAN_ANSWER),
        step_s=settings.step_s,
        duration_s=settings.hours * 3600,
        start_hour=settings.start_hour,
        max_per_step=settings.max_requests_per_step,
        seed=settings.seed,
        steady=settings.steady,
    )
    return day, (MEAN_PROMPT, MEAN_ANSWER), MAX_ANSWER


def _trace(settings: SimulateSettings, kind: WorkerKind, max_workers: int) -> tuple[Traffic, tuple[float, float], int]:
    trace = read_trace(settings.trace, step_s=settings.step_s, weight=settings.trace_weight or 1)
    trace = trace.within(kind.facts.context)
    if not settings.trace_weight:
        trace = trace.weighted(scaled(trace, settings.peak * max_workers * kind.capacity(*trace.mean_lengths)))
    return trace, trace.mean_lengths, trace.max_answer
