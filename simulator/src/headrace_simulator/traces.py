"""Traffic from a file in the column layout of a public trace.

    TIMESTAMP,ContextTokens,GeneratedTokens                            the Azure LLM inference traces
    Timestamp,Model,Request tokens,Response tokens,…                   BurstGPT

Times are dates, or seconds from any origin; rows may be in any order. Rows without an answer (failed requests) are left
out. A file is input from outside: what cannot be read is refused with its line.
"""

import csv
from collections.abc import Iterable
from datetime import UTC, datetime
from math import ceil, isfinite
from pathlib import Path

import numpy as np

from headrace_shared.errors import ConfigError
from headrace_simulator.arrivals import Arrivals, Floats, Ints

LAYOUTS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
)
MAX_ROWS = 50_000_000
MAX_DURATION_S = 31 * 86_400.0
MAX_TOKENS = 100_000_000
"""Of a prompt or an answer: far more than any model takes."""
RATE_S = 60.0
"""Over how long `rate` averages."""


class Trace:
    def __init__(self, times: Floats, prompts: Ints, answers: Ints, *, step_s: float, weight: int = 1) -> None:
        """Times in seconds from the first request on, in order. Each row stands for `weight` requests."""
        self._times = times
        self._prompts = prompts
        self._answers = answers
        self._weight = weight
        self._num_steps = int(times[-1] // step_s) + 1
        self._bounds = np.searchsorted(times, step_s * np.arange(self._num_steps + 1))
        self._bounds[-1] = len(times)
        self._width = max(1, round(RATE_S / step_s))
        self._step_s = step_s

    @property
    def weight(self) -> int:
        return self._weight

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def rate(self, step: int) -> float:
        first = max(0, min(step - self._width // 2, self._num_steps - self._width))
        last = min(first + self._width, self._num_steps)
        count = int(self._bounds[last] - self._bounds[first])
        return count * self._weight / ((last - first) * self._step_s)

    def arrivals(self, step: int) -> Arrivals:
        part = slice(int(self._bounds[step]), int(self._bounds[step + 1]))
        return Arrivals(self._prompts[part], self._answers[part])

    @property
    def mean_lengths(self) -> tuple[float, float]:
        return float(self._prompts.mean()), float(self._answers.mean())

    @property
    def max_answer(self) -> int:
        return int(self._answers.max())

    def within(self, context: int) -> "Trace":
        """Cut to what a worker can hold, as clients would have been made to."""
        prompts = np.minimum(self._prompts, context - 1)
        answers = np.minimum(self._answers, context - prompts)
        return Trace(self._times, prompts, answers, step_s=self._step_s, weight=self._weight)

    def weighted(self, weight: int) -> "Trace":
        """The same rows, each standing for `weight` requests."""
        return Trace(self._times, self._prompts, self._answers, step_s=self._step_s, weight=weight)


def read_trace(path: str, *, step_s: float, weight: int = 1) -> Trace:
    """Raises ConfigError naming the setting `trace`."""
    try:
        with Path(path).expanduser().open(newline="", encoding="utf-8-sig") as file:
            times, prompts, answers = _columns(csv.reader(file), path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("trace", f"cannot read {path}: {error}") from error
    if not times:
        raise ConfigError("trace", f"{path} holds no request")
    seconds = np.asarray(times)
    order = np.argsort(seconds, kind="stable")
    seconds = seconds[order] - seconds[order[0]]
    if seconds[-1] > MAX_DURATION_S:
        raise ConfigError("trace", f"{path} spans {seconds[-1] / 86_400:.0f} days, more than 31")
    return Trace(
        seconds,
        np.asarray(prompts, dtype=np.int64)[order],
        np.asarray(answers, dtype=np.int64)[order],
        step_s=step_s,
        weight=weight,
    )


def scaled(trace: Trace, wanted_peak: float) -> int:
    """The weight at which the trace's busiest minute has about so many requests a second; at least 1."""
    peak = max(trace.rate(step) for step in range(trace.num_steps)) / trace.weight
    return max(1, ceil(wanted_peak / peak - 0.5))


def _columns(rows: Iterable[list[str]], path: str) -> tuple[list[float], list[int], list[int]]:
    lines = iter(rows)
    head = [name.strip() for name in next(lines, [])]
    layout = next((names for names in LAYOUTS if all(name in head for name in names)), None)
    if layout is None:
        wanted = " or ".join(",".join(names) for names in LAYOUTS)
        raise ConfigError("trace", f"{path} has no columns {wanted}")
    at, prompt, answer = (head.index(name) for name in layout)
    times: list[float] = []
    prompts: list[int] = []
    answers: list[int] = []
    for number, row in enumerate(lines, start=2):
        if not row:
            continue
        try:
            time_s, num_prompt, num_answer = _seconds(row[at]), int(row[prompt]), int(row[answer])
            if not (0 <= num_prompt <= MAX_TOKENS and 0 <= num_answer <= MAX_TOKENS):
                raise ValueError("a negative number of tokens, or more than any model takes")
        except (ValueError, IndexError) as error:
            raise ConfigError("trace", f"{path}, line {number}: {error}") from error
        if not num_answer:
            continue
        if len(times) >= MAX_ROWS:
            raise ConfigError("trace", f"{path} holds more than {MAX_ROWS} requests")
        times.append(time_s)
        prompts.append(max(1, num_prompt))
        answers.append(num_answer)
    return times, prompts, answers


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        date = datetime.fromisoformat(text.strip())
        # Without a zone: not this machine's, whose clock may change twice a year.
        seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not isfinite(seconds):
        raise ValueError(f"{text!r} is no time")
    return seconds
