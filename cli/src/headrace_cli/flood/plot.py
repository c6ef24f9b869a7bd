"""Plots as SVG, without a library, so that a report is one file that anything can show. Pure."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 34

Point = tuple[float, float | None]
"""y is None where there is no value: the line has a gap there."""


class Line(NamedTuple):
    name: str
    points: Sequence[Point]
    colour: int
    """Number of a series colour of the page, from 1."""
    is_step: bool = False


class Axis(NamedTuple):
    label: str
    is_log: bool = False


def plot(lines: Sequence[Line], x: Axis, y: Axis, title: str) -> str:
    """An SVG element; its colours come from the page's style sheet."""
    points = [(px, py) for line in lines for px, py in line.points if py is not None and not (y.is_log and py <= 0)]
    points = [(px, py) for px, py in points if not (x.is_log and px <= 0)]
    if not points:
        return f'<p class="empty">{escape(title)}: no values.</p>'
    across = _Scale.over([px for px, _ in points], x.is_log, LEFT, WIDTH - RIGHT, is_from_zero=False)
    up = _Scale.over([py for _, py in points], y.is_log, HEIGHT - BOTTOM, TOP, is_from_zero=not y.is_log)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
    ]
    for tick in up.ticks():
        at = up.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{_short(tick)}</text>')
    for tick in across.ticks():
        at = across.place(tick)
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{_short(tick)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x.label)}</text>')
    parts.append(f'<text class="label" x="4" y="{TOP - 2}">{escape(y.label)}</text>')
    for line in lines:
        path = _path(line, across, up)
        if path:
            parts.append(f'<path class="series s{line.colour}" d="{path}"><title>{escape(line.name)}</title></path>')
    parts.append("</svg>")
    legend = "".join(f'<span class="key s{line.colour}">{escape(line.name)}</span>' for line in lines)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption>{"".join(parts)}<div class="legend">{legend}</div></figure>'
    )


class _Scale(NamedTuple):
    low: float
    high: float
    is_log: bool
    begin: float
    end: float
    """Pixels of low and high."""

    @classmethod
    def over(cls, values: Sequence[float], is_log: bool, begin: float, end: float, *, is_from_zero: bool) -> "_Scale":
        low, high = min(values), max(values)
        if is_log:
            low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
            return cls(low, high if high > low else low * 10.0, True, begin, end)
        low = 0.0 if is_from_zero else low
        return cls(low, high if high > low else low + 1.0, False, begin, end)

    def place(self, value: float) -> float:
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if self.is_log:
            return [10.0**power for power in range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)]
        rough = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _path(line: Line, across: _Scale, up: _Scale) -> str:
    parts: list[str] = []
    is_open = False
    for x, y in line.points:
        if y is None or (up.is_log and y <= 0) or (across.is_log and x <= 0):
            is_open = False
            continue
        px, py = f"{across.place(x):.1f}", f"{up.place(y):.1f}"
        if not is_open:
            parts.append(f"M{px} {py}")
        else:
            parts.append(f"H{px}V{py}" if line.is_step else f"L{px} {py}")
        is_open = True
    return "".join(parts)


def _short(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"
