"""What `headrace up` shows: a live table on a terminal, plain lines otherwise."""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_PERIOD_S = 5.0
"""Least time between two progress lines of one process."""


class Row(NamedTuple):
    name: str
    state: str
    loading: tuple[float, float] | None = None
    """(done, total)"""


class Display(Protocol):
    def say(self, line: str) -> None:
        """One line that stays."""
        ...

    def show(self, rows: Sequence[Row]) -> None:
        """The processes as they are now."""
        ...

    def close(self) -> None:
        """Ends the table; `say` still works."""
        ...


def make_display(environ: Mapping[str, str], stream: IO[str] | None = None) -> Display:
    stream = stream or sys.stdout
    if stream.isatty() and not environ.get("NO_COLOR") and not environ.get("CI") and environ.get("TERM") != "dumb":
        return LiveDisplay(stream)
    return PlainDisplay(stream)


class PlainDisplay:
    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._shown: dict[str, tuple[Row, float]] = {}

    def say(self, line: str) -> None:
        # A reader that has gone, or a terminal, must not bring the instance down.
        with contextlib.suppress(OSError):
            self._stream.write(line + "\n")
            self._stream.flush()

    def show(self, rows: Sequence[Row]) -> None:
        now = time.monotonic()
        for row in rows:
            before, shown_at = self._shown.get(row.name, (None, 0.0))
            is_due = before is None or before.state != row.state or now - shown_at >= PLAIN_PERIOD_S
            if row != before and is_due:
                self._shown[row.name] = (row, now)
                self.say(
                    f"{row.name}: {row.state} {_percent(row.loading)}" if row.loading else f"{row.name}: {row.state}"
                )

    def close(self) -> None:
        self._shown.clear()


class LiveDisplay:
    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._is_open = False

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(Text(line), soft_wrap=True)

    def show(self, rows: Sequence[Row]) -> None:
        with contextlib.suppress(OSError):  # as in `say`: the terminal may be closed
            self._show(rows)

    def _show(self, rows: Sequence[Row]) -> None:
        if not self._is_open:
            self._is_open = True
            self._live.start()
        table = Table.grid(padding=(0, 2))
        for row in rows:
            detail: RenderableType = ""
            if row.loading:
                done, total = row.loading
                detail = Group(ProgressBar(total=total, completed=done, width=40))
            percent = _percent(row.loading) if row.loading else ""
            table.add_row(Text(row.name, style="bold"), _styled(row.state), detail, percent)
        self._live.update(table)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(OSError):
                self._live.stop()


def _percent(loading: tuple[float, float]) -> str:
    return f"{100 * loading[0] / loading[1]:.0f} %"


def _styled(state: str) -> Text:
    styles = {"ready": "green", "running": "green", "failed": "red", "restarting": "yellow"}
    return Text(state, style=styles.get(state, "cyan"))
