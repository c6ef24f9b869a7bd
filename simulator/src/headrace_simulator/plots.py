"""The report as pictures: a column of panels over the time of the run, one line for each policy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace_shared.errors import ConfigError
from headrace_simulator.recorder import Result, Series

Values = Sequence[float | None]

PANELS: tuple[tuple[str, Callable[[Series], Values], bool], ...] = (
    ("requests/s", lambda series: series.arrivals_per_s, False),
    ("queue", lambda series: series.queue, False),
    ("replicas", lambda series: series.ready, False),
    ("parked", lambda series: series.parked, False),
    ("TTFT p50, s", lambda series: series.ttft_p50_s, True),
    ("TTFT p99, s", lambda series: series.ttft_p99_s, True),
    ("cost per hour", lambda series: series.cost_per_hour, False),
    ("shed/min", lambda series: series.shed, False),
)
"""Label, values, and whether the axis is logarithmic."""


def has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401 - an optional extra; only asked whether it is there
    except ImportError:
        return False
    return True


def draw(results: Sequence[Result], folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Writes fleet.svg and fleet.png, as asked for. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots", "needs matplotlib: pip install headrace-simulator[plots]") from error
    figure = Figure(figsize=(11, 2.0 * len(PANELS)), layout="constrained")
    axes: list[Any] = list(figure.subplots(len(PANELS), 1, sharex=True))
    for axis, (label, values, is_log) in zip(axes, PANELS, strict=True):
        shown = results[:1] if label == "requests/s" else results
        for result in shown:
            hours = [minute / 60 for minute in result.series.minutes]
            numbers = [float("nan") if value is None else value for value in values(result.series)]
            axis.plot(hours, numbers, label=result.policy, linewidth=0.9)
        if is_log:
            axis.set_yscale("log")
            axis.axhline(results[0].target_s, color="grey", linewidth=0.6, linestyle="--")
        axis.set_ylabel(label)
        axis.grid(visible=True, linewidth=0.3)
    axes[1].legend(loc="upper left", fontsize="small", ncols=min(5, len(results)))
    axes[-1].set_xlabel("hours")
    paths = [folder / f"fleet.{kind}" for kind in kinds]
    for path in paths:
        figure.savefig(path, dpi=110)
    return paths
