"""What is shown while a flood runs: a live panel on a terminal, a line every five seconds otherwise."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace_cli.flood.meter import Meter
from headrace_cli.flood.report import percentile

PLAIN_PERIOD_S = 5.0
RECENT_S = 5
BARS = "▁▂▃▄▅▆▇█"
GRAPH_S = 48


class View(Protocol):
    def show(self, meter: Meter, now: float) -> None: ...

    def close(self) -> None: ...


def make_view(title: str, duration: float, environ: Mapping[str, str], stream: IO[str]) -> View:
    if stream.isatty() and not environ.get("NO_COLOR") and not environ.get("CI") and environ.get("TERM") != "dumb":
        return LiveView(title, duration, stream)
    return PlainView(title, stream)


class PlainView:
    def __init__(self, title: str, stream: IO[str]) -> None:
        self._stream = stream
        self._next_at = PLAIN_PERIOD_S
        self._say(title)

    def show(self, meter: Meter, now: float) -> None:
        if now >= self._next_at:
            self._next_at += PLAIN_PERIOD_S
            rates = recent_rates(meter, now)
            self._say(
                f"{now:5.0f} s: {meter.num_open} open, {rates.complete:.1f} answers/s, {rates.tokens:.0f} tokens/s, "
                f"TTFT p50 {_ms(meter.recent_ttfts, 50)}, ITL p50 {_ms(meter.recent_gaps, 50)}, "
                f"{sum(meter.errors.values())} errors"
            )

    def close(self) -> None:
        """Nothing is open."""

    def _say(self, line: str) -> None:
        # A reader that has gone must not end the flood.
        with contextlib.suppress(OSError):
            self._stream.write(line + "\n")
            self._stream.flush()


class LiveView:
    def __init__(self, title: str, duration: float, stream: IO[str]) -> None:
        self._title = title
        self._duration = duration
        self._live = Live(console=Console(file=stream, highlight=False), auto_refresh=False, transient=True)
        self._live.start()

    def show(self, meter: Meter, now: float) -> None:
        self._live.update(panel(self._title, meter, now, self._duration), refresh=True)

    def close(self) -> None:
        self._live.stop()


def panel(title: str, meter: Meter, now: float, duration: float) -> RenderableType:
    """All of the live view."""
    rates = recent_rates(meter, now)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=duration, completed=min(now, duration), width=40),
        f"{min(now, duration):.0f} of {duration:.0f} s" if now < duration else f"waiting for {meter.num_open} answers",
    )
    latency = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("", "p50", "p90", "p99"):
        latency.add_column(heading, justify="right" if heading else "left")
    for name, values in (("time to first token", meter.recent_ttfts), ("inter-token latency", meter.recent_gaps)):
        latency.add_row(name, *(_ms(values, percent) for percent in (50, 90, 99)))
    flow = Table.grid(padding=(0, 2))
    seconds = meter.seconds[:-1][-GRAPH_S:]
    flow.add_row("tokens/s", f"{rates.tokens:,.0f}", Text(bars([each.num_chunks for each in seconds]), style="cyan"))
    flow.add_row("open", f"{meter.num_open:,}", Text(bars([each.num_open for each in seconds]), style="magenta"))
    flow.add_row(
        "answers/s", f"{rates.complete:.1f}", Text(bars([each.num_complete for each in seconds]), style="green")
    )
    slo = meter.slo
    good = meter.num_good / meter.num_complete if meter.num_complete else 0.0
    flow.add_row("good", f"{good:.0%}", f"TTFT ≤ {1e3 * slo.ttft_s:g} ms, TPOT ≤ {1e3 * slo.tpot_s:g} ms")
    errors = ", ".join(f"{count} x {error}" for error, count in sorted(meter.errors.items())) or "none"
    flow.add_row("errors", Text(errors, style="red" if meter.errors else "dim"))
    return Group(Text(title, style="bold"), bar, "", flow, "", latency)


class Rates:
    """A second, over the last few."""

    def __init__(self, tokens: float, complete: float) -> None:
        self.tokens = tokens
        self.complete = complete


def recent_rates(meter: Meter, now: float) -> Rates:
    last = int(now)
    recent = meter.seconds[max(0, last - RECENT_S) : last]
    count = max(1, len(recent))
    tokens = sum(second.num_chunks for second in recent) / count
    return Rates(tokens, sum(second.num_complete for second in recent) / count)


def bars(values: Sequence[float]) -> str:
    """A row of bars, the largest value being full height."""
    largest = max(values, default=0)
    if not largest:
        return BARS[0] * len(values)
    return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * value / largest))] for value in values)


def _ms(values: Iterable[float], percent: float) -> str:
    value = percentile(list(values), percent)
    return "–" if value is None else f"{1000.0 * value:,.0f} ms"
