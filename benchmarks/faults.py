"""What a fleet's clients notice of kills, freezes, lost brokers, and of each other's leaving.

    python -m benchmarks.faults [kills] [freezes] [broker] [disconnects] [soak]
                                [--kills 200] [--frozen-s 30] [--disconnects 10000] [--minutes 30]
                                [--engine real|scripted] [--seed 1] [--keep FOLDER]

Two routers, two schedulers and two workers as processes on a broker of their own, 16 clients. Without a name all runs
are made. Prints one table; exit code 1 if a line of it does not hold.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.fault_runs import Line, Runs
from headrace_shared.logs import configure_logging

NAMES = ("kills", "freezes", "broker", "disconnects", "soak")


async def run(options: argparse.Namespace, folder: Path) -> list[tuple[str, Line]]:
    runs = Runs(folder, options.seed, options.engine == "real")
    works: dict[str, Callable[[], Awaitable[list[Line]]]] = {
        "kills": lambda: runs.kills(options.kills),
        "freezes": lambda: runs.freezes(options.frozen_s),
        "broker": runs.broker,
        "disconnects": lambda: runs.disconnects(options.disconnects),
        "soak": lambda: runs.soak(options.minutes),
    }
    table: list[tuple[str, Line]] = []
    for name in options.names or NAMES:
        started_at = time.monotonic()
        try:
            lines = await works[name]()
        except AssertionError as error:
            lines = [Line("ended early", " ".join(str(error).split())[:160], False)]
        table += [(name, line) for line in lines]
        table.append((name, Line("took", f"{time.monotonic() - started_at:.0f} s", True)))
    return table


def show(table: list[tuple[str, Line]]) -> str:
    rows = [(name, line.name, line.figure, "yes" if line.holds else "NO") for name, line in table]
    rows.insert(0, ("run", "what", "figure", "holds"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="RUN", choices=[*NAMES, []], help=", ".join(NAMES))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--frozen-s", type=float, default=30.0)
    parser.add_argument("--disconnects", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--engine", choices=("real", "scripted"), default="real")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for logs; a temporary one if not given")
    options = parser.parse_args()
    configure_logging("benchmark", "faults", "warning", "console")
    with tempfile.TemporaryDirectory() as scratch:
        table = asyncio.run(run(options, options.keep or Path(scratch)))
    sys.stdout.write(show(table) + "\n")
    return 0 if all(line.holds for _, line in table) else 1


if __name__ == "__main__":
    sys.exit(main())
