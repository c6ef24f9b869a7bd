"""Rows of the one table, on their way from a section's process, and as markdown."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_PREFIX = "ROW "


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `fraction`: of the ceiling that `of` names. `target`: the smallest good fraction, or the largest
    where `target_is_most`."""

    section: str
    case: str
    value: float
    unit: str
    fraction: float | None = None
    of: str = ""
    target: float | None = None
    target_is_most: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.fraction is None or self.target is None:
            return ""
        is_met = self.fraction <= self.target if self.target_is_most else self.fraction >= self.target
        return "met" if is_met else "missed"


def emit(row: Row) -> None:
    """Said by a section's process to the one that makes the table."""
    sys.stdout.write(f"{_PREFIX}{json.dumps(asdict(row))}\n")
    sys.stdout.flush()


def parse(line: str) -> Row | None:
    """None: not a row, but something for people to read."""
    return Row(**json.loads(line.removeprefix(_PREFIX))) if line.startswith(_PREFIX) else None


def markdown(rows: Sequence[Row], failures: dict[str, str], facts: dict[str, str]) -> str:
    """`failures`: section -> why it has no or not all of its rows. `facts`: date, chip, versions."""
    lines = ["# GPU benchmark", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| section | case | value | of the ceiling | target | |", "|---|---|---:|---:|---:|---|"]
    for row in rows:
        fraction = "" if row.fraction is None else f"{row.fraction:.0%} of {row.of}"
        target = "" if row.target is None else f"{'≤' if row.target_is_most else '≥'} {row.target:.0%}"
        note = ", ".join(part for part in (row.verdict, row.note) if part)
        lines.append(
            f"| {row.section} | {row.case} | {_number(row.value)} {row.unit} | {fraction} | {target} | {note} |"
        )
    lines += [f"| {section} | | not measured | | | {reason} |" for section, reason in failures.items()]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if value == 0.0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
