"""How much of what they could do a model's workers do, from the counters that they report. Pure.

Each report's differences go into a fit of what iterations, tokens and prompt tokens cost (`engine_speed.py`); the rates
of late, at these costs and with full batches, are the load. Unlike the number of sequences it is proportional to the
requests that come.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headrace_shared.engine_speed import SpeedMeter, Work
from headrace_shared.messages import WorkerId
from headrace_shared.telemetry import BUSY_S, NUM_ITERATIONS, NUM_OUTPUT_TOKENS, NUM_PREFILL_TOKENS

FULL = 0.8
"""Share of a worker's places that makes a full batch: beyond it everybody only becomes slower."""


class Rates(NamedTuple):
    """Of one worker: its counters at the last report, and tokens a second since the one before. Not smoothed: the
    policy compares the load with what has just come and ended."""

    counters: Work
    at: float
    outputs: float = 0.0
    prompt_tokens: float = 0.0

    def after(self, counters: Work, now: float) -> "Rates":
        elapsed_s = now - self.at
        if elapsed_s <= 0:
            return self
        outputs = (counters.num_outputs - self.counters.num_outputs) / elapsed_s
        prompts = (counters.num_prompt_tokens - self.counters.num_prompt_tokens) / elapsed_s
        return Rates(counters, now, outputs, prompts)


def counters_of(gauges: Mapping[str, float]) -> Work | None:
    """None of a worker that does not report them all."""
    values = [gauges.get(name) for name in (BUSY_S, NUM_ITERATIONS, NUM_OUTPUT_TOKENS, NUM_PREFILL_TOKENS)]
    known = [value for value in values if value is not None]
    return Work(*known) if len(known) == len(values) else None


class Loads:
    """Of one model."""

    def __init__(self) -> None:
        self._meter = SpeedMeter()
        self._rates: dict[WorkerId, Rates] = {}

    def on_counters(self, worker: WorkerId, counters: Work, now: float) -> None:
        """Counters that fell have started anew."""
        known = self._rates.get(worker)
        if known is None or any(new < old for new, old in zip(counters, known.counters, strict=True)):
            self._rates[worker] = Rates(counters, now)
            return
        self._meter.observe(Work(*(new - old for new, old in zip(counters, known.counters, strict=True))), now)
        self._rates[worker] = known.after(counters, now)

    def forget(self, kept: Iterable[WorkerId]) -> None:
        """All but these."""
        self._rates = {worker: self._rates[worker] for worker in kept if worker in self._rates}

    def load(self, places: Mapping[WorkerId, int]) -> float | None:
        """Of the workers in `places`, which says how many sequences each runs at a time: the mean, 1 for all they can
        do. One that has reported nothing yet has just come, and does nothing; one that has fallen silent goes on as it
        did. None while their speed is not known."""
        speed = self._meter.speed()
        seen = [(self._rates[worker], most) for worker, most in places.items() if worker in self._rates]
        if speed is None or not seen:
            return None
        return sum(speed.load(rates.outputs, rates.prompt_tokens, FULL * most) for rates, most in seen) / len(places)
