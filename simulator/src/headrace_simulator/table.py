"""The report as text."""

from collections.abc import Sequence

from headrace_simulator.recorder import Result

_COLUMNS = (
    "policy",
    "in time",
    "TTFT p50",
    "p99",
    "GPU hours",
    "of peak",
    "workers",
    "changes/h",
    "shed",
    "starts",
    "promoted",
)


def make_table(results: Sequence[Result]) -> str:
    """One line for each policy; costs relative to fixed-peak if that is among them."""
    peak = next((each.cost for each in results if each.policy == "fixed-peak"), None)
    rows = [_COLUMNS, *(_row(each, peak) for each in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _row(result: Result, peak: float | None) -> tuple[str, ...]:
    return (
        result.policy,
        f"{100 * result.within_target:.2f} %",
        f"{result.ttft_p50_s:.3g} s",
        f"{result.ttft_p99_s:.3g} s",
        f"{result.gpu_hours:,.0f}",
        f"{100 * result.cost / peak:.1f} %" if peak else "–",
        f"{result.mean_workers:.0f} (max {result.max_workers})",
        f"{result.changes_per_hour:.1f}",
        f"{result.num_shed:,}",
        f"{result.num_cold_starts:,}",
        f"{result.num_promotions:,}",
    )
