"""A generated day: quiet nights, a busy afternoon, noise, and surges that nobody announces.

Lengths are lognormal. Their medians are those of the conversation trace of Patel et al. (Splitwise, ISCA 2024): 1,020
tokens of prompt and 129 of answer; the spreads and the shape of the day are assumptions. For anything else there are
trace files.
"""

from math import ceil

import numpy as np

from headrace_simulator.arrivals import Arrivals, Floats

HOURS = (
    *(0.24, 0.18, 0.14, 0.12, 0.12, 0.13, 0.17, 0.26, 0.42, 0.60, 0.72, 0.78),
    *(0.74, 0.78, 0.84, 0.86, 0.80, 0.68, 0.58, 0.54, 0.52, 0.46, 0.38, 0.30),
)
"""Share of the peak at each full hour; between them, straight lines."""
SURGES = ((9.2, 0.14, 600.0), (15.5, 0.14, 900.0), (20.7, 0.20, 480.0))
"""(hour, further share of the peak, seconds): it rises and falls within SURGE_RAMP_S."""
SURGE_RAMP_S = 90.0
NOISE = 0.03
"""Standard deviation of the rate around the day's shape, as a share of it."""
NOISE_S = 300.0
"""Correlation time of that noise."""
DAY_S = 86_400.0
MEDIAN_PROMPT, PROMPT_SPREAD, MAX_PROMPT = 1020.0, 0.5, 8192
MEDIAN_ANSWER, ANSWER_SPREAD, MAX_ANSWER = 129.0, 1.0, 2048
MEAN_PROMPT = MEDIAN_PROMPT * float(np.exp(PROMPT_SPREAD**2 / 2))
MEAN_ANSWER = MEDIAN_ANSWER * float(np.exp(ANSWER_SPREAD**2 / 2))


class Day:
    """Traffic of a day, or of the first `duration_s` of it from `start_hour` on."""

    def __init__(
        self,
        peak_rate: float,
        *,
        step_s: float,
        duration_s: float = DAY_S,
        start_hour: float = 0.0,
        max_per_step: int = 1500,
        seed: int = 0,
        steady: bool = False,
    ) -> None:
        """`peak_rate`: requests a second at the top of the highest surge, without noise. `max_per_step`: bounds what is
        simulated one by one. `steady`: the peak rate all the time, with the noise of chance alone."""
        self._seed = seed
        self._step_s = step_s
        self._num_steps = ceil(duration_s / step_s)
        middles: Floats = step_s * (np.arange(self._num_steps, dtype=np.float64) + 0.5)
        seconds: Floats = np.mod(start_hour * 3600 + middles, DAY_S)
        shape = np.ones(self._num_steps) if steady else _shape(seconds) * _noise(self._num_steps, step_s, seed)
        self._rates: Floats = peak_rate * shape
        self._weight = max(1, ceil(peak_rate * step_s / max_per_step))

    @property
    def weight(self) -> int:
        return self._weight

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def rate(self, step: int) -> float:
        return float(self._rates[step])

    def arrivals(self, step: int) -> Arrivals:
        random = np.random.default_rng((self._seed, step))
        # Many requests vary less, relative to their number, than the few that stand for them would.
        count = int(random.poisson(self._rates[step] * self._step_s) / self._weight + random.random())
        prompts = random.lognormal(np.log(MEDIAN_PROMPT), PROMPT_SPREAD, count)
        answers = random.lognormal(np.log(MEDIAN_ANSWER), ANSWER_SPREAD, count)
        return Arrivals(
            np.clip(prompts, 1, MAX_PROMPT).astype(np.int64), np.clip(answers, 1, MAX_ANSWER).astype(np.int64)
        )


def _shape(seconds: Floats) -> Floats:
    hours = seconds / 3600
    shape = np.interp(hours, np.arange(25), (*HOURS, HOURS[0]))
    for hour, height, duration_s in SURGES:
        since = seconds - hour * 3600
        shape += height * np.clip(np.minimum(since, duration_s - since) / SURGE_RAMP_S, 0.0, 1.0)
    return np.asarray(shape, dtype=np.float64)


def _noise(num_steps: int, step_s: float, seed: int) -> Floats:
    """A first-order autoregressive process around 1, drawn at half the correlation time and joined by lines."""
    spacing_s = NOISE_S / 2
    keep = float(np.exp(-spacing_s / NOISE_S))
    num = ceil(num_steps * step_s / spacing_s) + 2
    drawn = np.random.default_rng((seed, 1 << 40)).normal(0.0, NOISE * (1 - keep**2) ** 0.5, num)
    for index in range(1, num):
        drawn[index] += keep * drawn[index - 1]
    at = np.arange(num_steps) * step_s / spacing_s
    return np.asarray(np.maximum(0.0, 1 + np.interp(at, np.arange(num), drawn)), dtype=np.float64)
