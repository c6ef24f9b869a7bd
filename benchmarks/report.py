"""Medians of `benchmarks.engine`, and what they are compared with."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.client import Summary
from benchmarks.limits import Limits, tokens_per_s
from benchmarks.peers.server import ServerSpec, Start
from headrace_worker.models.config import ModelConfig

MIB = 1 << 20
BITS = {"bf16": 16.0, "int8": 8.5, "int4": 5.7, "q4_0": 5.4}
"""Of a weight, scales and the head in 8 bits included: what the limit by memory goes by."""


@dataclass
class Results:
    runs: dict[tuple[str, str], list[Summary]] = field(default_factory=dict)
    """By server and workload: a concurrency, or the shared head."""
    starts: dict[str, list[Start]] = field(default_factory=dict)
    memory: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    """Peaks by process, in bytes."""

    def add(self, server: str, workload: str, summary: Summary) -> None:
        if summary.num_complete != summary.num_requests:
            raise RuntimeError(f"{server}: {summary.num_complete} of {summary.num_requests} requests were answered")
        self.runs.setdefault((server, workload), []).append(summary)
        print(f"  {server}, {workload}: {_line(summary)}", flush=True)

    def median(self, server: str, workload: str, value: Callable[[Summary], float]) -> float | None:
        runs = self.runs.get((server, workload))
        return median(map(value, runs)) if runs else None


def print_report(results: Results, specs: Sequence[ServerSpec], config: ModelConfig, limits: Limits) -> None:
    gb, gflops = limits.bytes_per_s / 1e9, limits.flops_per_s / 1e9
    load = os.getloadavg()[0]
    print(f"\nlimits: {gb:.1f} GB/s, {gflops:.0f} GFLOP/s in bfloat16; load average at the end {load:.1f}")
    for workload in dict.fromkeys(workload for _, workload in results.runs):
        print(f"\n{workload if workload.startswith('shared') else 'concurrency ' + workload}")
        print(f"  {'':15}{'tokens/s':>9} {'(min-max)':>15}{'TTFT p50':>10}{'p99':>8}{'ITL p50':>9}{'p99':>8}  of limit")
        for spec in specs:
            if runs := results.runs.get((spec.name, workload)):
                print(f"  {spec.name:15}{_medians(runs)}{_share(spec, workload, runs, config, limits)}")
    print("\nratios (medians of this run)")
    for line in _ratios(results, specs):
        print(f"  {line}")
    print("\nstart to the first token, s; peak memory, MiB (pages that several processes map count in each)")
    for spec in specs:
        if spec.name in results.starts:
            print(f"  {spec.name:15}{_start(results.starts[spec.name])}  {_memory(results.memory.get(spec.name, []))}")


def _line(summary: Summary) -> str:
    return (
        f"{summary.tokens_per_s:.1f} tokens/s, TTFT {summary.ttft_p50_ms:.0f} / {summary.ttft_p99_ms:.0f} ms, "
        f"ITL {summary.itl_p50_ms:.1f} / {summary.itl_p99_ms:.0f} ms"
    )


def _medians(runs: Sequence[Summary]) -> str:
    rates = [run.tokens_per_s for run in runs]
    spread = f"({min(rates):.1f}-{max(rates):.1f})"
    values = [median(getattr(run, name) for run in runs) for name in _LATENCIES]
    return f"{median(rates):9.1f} {spread:>15}{values[0]:10.0f}{values[1]:8.0f}{values[2]:9.1f}{values[3]:8.1f}"


_LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")


def _share(spec: ServerSpec, workload: str, runs: Sequence[Summary], config: ModelConfig, limits: Limits) -> str:
    if not workload.isdigit():
        return ""
    limit = tokens_per_s(config, limits, int(workload), BITS[spec.weights])
    return f"  {median(run.tokens_per_s for run in runs) / limit:.0%} of {limit:.0f}"


@dataclass(frozen=True)
class _Target:
    ours: str
    others: tuple[str, ...]
    workloads: tuple[str, ...]
    """Empty: every concurrency."""
    name: str
    value: Callable[[Summary], float]
    bound: float
    at_least: bool


_BF16_PEERS = ("vllm", "llama-bf16")
_TARGETS = (
    _Target("headrace", _BF16_PEERS, (), "tokens/s", lambda run: run.tokens_per_s, 1.3, True),
    _Target("headrace-int8", ("llama-q4_0",), (), "tokens/s", lambda run: run.tokens_per_s, 1.3, True),
    _Target("headrace-int4", ("llama-q4_0",), (), "tokens/s", lambda run: run.tokens_per_s, 1.3, True),
    _Target("headrace", ("vllm",), ("16", "32"), "ITL p99", lambda run: run.itl_p99_ms, 0.25, False),
    _Target("headrace", ("vllm",), (), "TTFT p50", lambda run: run.ttft_p50_ms, 1.0, False),
    _Target("headrace", ("vllm",), ("shared head",), "tokens/s", lambda run: run.tokens_per_s, 1.2, True),
    _Target("headrace", ("vllm",), ("shared head",), "TTFT p50", lambda run: run.ttft_p50_ms, 1.0, False),
)


def _ratios(results: Results, specs: Sequence[ServerSpec]) -> list[str]:
    measured = list(dict.fromkeys(workload for _, workload in results.runs))
    lines = []
    for target in _TARGETS:
        for workload in target.workloads or tuple(name for name in measured if name.isdigit()):
            own = results.median(target.ours, workload, target.value)
            others = [results.median(name, workload, target.value) for name in target.others]
            known = [value for value in others if value is not None]
            if own is None or not known:
                continue
            ratio = own / (max(known) if target.at_least else min(known))
            met = ratio >= target.bound if target.at_least else ratio <= target.bound
            sign = ">=" if target.at_least else "<="
            rival = " or ".join(name for name, value in zip(target.others, others, strict=True) if value is not None)
            lines.append(
                f"{target.ours} / {rival}, {target.name} at {workload}: {ratio:.2f} "
                f"({sign} {target.bound}: {'met' if met else 'missed'})"
            )
    return lines


def _start(starts: Sequence[Start]) -> str:
    listening = median(start.listening_s for start in starts)
    return f"{median(start.first_token_s for start in starts):7.2f} (answers HTTP after {listening:.2f})"


def _memory(peaks: Sequence[dict[str, int]]) -> str:
    if not peaks:
        return ""
    largest = max(peaks, key=lambda one: sum(one.values()))
    parts = ", ".join(f"{name} {size / MIB:.0f}" for name, size in sorted(largest.items(), key=lambda item: -item[1]))
    return f"{sum(largest.values()) / MIB:.0f}: {parts}"
