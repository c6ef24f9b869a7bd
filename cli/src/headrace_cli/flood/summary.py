"""A report as text for a terminal, and two beside each other. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace_cli.flood.report import Report, Spread

_SPREADS: tuple[tuple[str, str, Callable[[Report], Spread]], ...] = (
    ("TTFT", "time to first token", lambda report: report.ttft),
    ("TPOT", "time per output token", lambda report: report.tpot),
    ("ITL", "inter-token latency", lambda report: report.itl),
    ("latency", "whole answer", lambda report: report.latency),
)
LATE_MS = 20.0
"""A generator that is later than this at p99 says so: the figures are then partly about itself."""
_WORKLOAD_SETTINGS = (
    "endpoint", "rate", "concurrency", "arrivals", "burst_size", "trace", "trace_speed", "duration", "prompt_tokens",
    "output_tokens", "prefix_tokens", "prefixes", "turns", "think", "ignore_eos", "slo_ttft", "slo_tpot",
)  # fmt: skip


def describe(settings: dict[str, Any]) -> str:
    """The load in a line."""
    if settings.get("concurrency"):
        load = f"{settings['concurrency']} conversations at a time"
    elif settings.get("trace"):
        load = f"trace {settings['trace']} at {settings['trace_speed']:g}x"
    else:
        load = f"{settings['rate']:g} conversations/s, {settings['arrivals']}"
    turns = f", {settings['turns']} turns" if settings.get("turns", 1) > 1 else ""
    prefix = f" + {settings['prefix_tokens']} shared" if settings.get("prefix_tokens") else ""
    return f"{load}; prompts {settings['prompt_tokens']}{prefix}, answers {settings['output_tokens']} tokens{turns}"


def summary(report: Report) -> str:
    settings = report.settings
    slo = f"TTFT <= {settings['slo_ttft']:g} ms, TPOT <= {settings['slo_tpot']:g} ms"
    lines = [
        f"{report.model} at {settings['url']}: {describe(settings)}",
        f"window {report.window_s:.1f} s: {report.num_requests} requests due, {report.num_complete} complete, "
        f"{report.num_late} of them after it, {sum(report.errors.values())} errors, {report.num_unfinished} unfinished",
        f"offered     {report.offered_per_s:.2f} requests/s due in the window",
        f"throughput  {report.complete_per_s:.2f} requests/s complete in the window, "
        f"{report.output_tokens_per_s:.1f} output tokens/s",
        f"goodput     {report.good_per_s:.2f} requests/s of these within {slo}; "
        f"so were {report.good_share:.1%} of all that were due",
        f"tokens      {report.prompt_tokens} in ({report.cached_tokens} cached), {report.output_tokens} out",
        "",
        f"{'ms':<28}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}{'max':>10}{'mean':>10}",
    ]
    lines += [_row(f"{name} ({text})", get(report)) for name, text, get in _SPREADS]
    lines += [f"  {count} x {error}" for error, count in sorted(report.errors.items())]
    if (report.send_lag.p99 or 0.0) > LATE_MS:
        lines.append(f"The generator itself was late: p99 {report.send_lag.p99:.0f} ms, which the latencies include.")
    return "\n".join(lines) + "\n"


class _Compared(NamedTuple):
    name: str
    get: Callable[[Report], float | None]
    is_better_high: bool
    unit: str = "ms"


_COMPARED = (
    _Compared("complete requests/s", lambda report: report.complete_per_s, True, "1/s"),
    _Compared("output tokens/s", lambda report: report.output_tokens_per_s, True, "1/s"),
    _Compared("goodput", lambda report: report.good_per_s, True, "1/s"),
    _Compared("good share", lambda report: 100.0 * report.good_share, True, "%"),
    _Compared("errors", lambda report: float(sum(report.errors.values())), False, ""),
    _Compared("TTFT p50", lambda report: report.ttft.p50, False),
    _Compared("TTFT p99", lambda report: report.ttft.p99, False),
    _Compared("TPOT p50", lambda report: report.tpot.p50, False),
    _Compared("TPOT p99", lambda report: report.tpot.p99, False),
    _Compared("ITL p50", lambda report: report.itl.p50, False),
    _Compared("ITL p99", lambda report: report.itl.p99, False),
    _Compared("latency p50", lambda report: report.latency.p50, False),
    _Compared("latency p99", lambda report: report.latency.p99, False),
)
SAME = 0.03
"""Ratios this close to 1 are called neither better nor worse."""


def compare(first: Report, second: Report, names: Sequence[str]) -> str:
    """B against A. Says where the two loads differ: then they are no comparison of servers."""
    lines = [f"A  {names[0]}: {first.model}, {first.started_at}", f"B  {names[1]}: {second.model}, {second.started_at}"]
    differing = [
        f"  {key}: A {first.settings.get(key)}, B {second.settings.get(key)}"
        for key in _WORKLOAD_SETTINGS
        if first.settings.get(key) != second.settings.get(key)
    ]
    if differing:
        lines += ["The loads differ:", *differing]
    lines += ["", f"{'':<22}{'':<5}{'A':>12}{'B':>12}{'B / A':>9}"]
    for row in _COMPARED:
        a, b = row.get(first), row.get(second)
        lines.append(f"{row.name:<22}{row.unit:<5}{_number(a)}{_number(b)}{_ratio(a, b, row.is_better_high)}".rstrip())
    return "\n".join(lines) + "\n"


def _row(name: str, spread: Spread) -> str:
    values = (spread.p50, spread.p90, spread.p95, spread.p99, spread.max, spread.mean)
    return f"{name:<28}" + "".join("         -" if value is None else f"{value:10.1f}" for value in values)


def _number(value: float | None) -> str:
    return f"{'-':>12}" if value is None else f"{value:12.2f}"


def _ratio(a: float | None, b: float | None, is_better_high: bool) -> str:
    if a is None or b is None or a <= 0.0:
        return ""
    ratio = b / a
    if abs(ratio - 1.0) <= SAME:
        return f"{ratio:9.2f}  same"
    return f"{ratio:9.2f}  {'better' if (ratio > 1.0) == is_better_high else 'worse'}"
