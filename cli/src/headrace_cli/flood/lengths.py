"""Distributions of lengths in tokens, written as `N`, `uniform:LOW:HIGH`, `normal:MEAN:DEVIATION`,
`lognormal:MEDIAN:SIGMA` or `choice:N:N:…`. Pure."""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from headrace_shared.errors import ConfigError

MAX_TOKENS = 1_000_000


class Lengths(NamedTuple):
    text: str
    """As it was written."""
    draw_value: Callable[[random.Random], float]

    def draw(self, rng: random.Random) -> int:
        """At least 1."""
        return min(MAX_TOKENS, max(1, round(self.draw_value(rng))))


def parse_lengths(text: str, key: str) -> Lengths:
    """Raises ConfigError naming `key`."""
    kind, *written = text.split(":") if ":" in text else ("choice", text)
    try:
        values = [float(value) for value in written]
    except ValueError as error:
        raise ConfigError(key, f"{text!r} has something that is no number") from error
    if not all(math.isfinite(value) and 0 <= value <= MAX_TOKENS for value in values):
        raise ConfigError(key, f"{text!r} has a number outside 0 … {MAX_TOKENS}")
    match kind, values:
        case "choice", [_, *_] if all(value >= 1 and value == int(value) for value in values):
            return Lengths(text, lambda rng: rng.choice(values))
        case "uniform", [low, high] if 1 <= low <= high:
            return Lengths(text, lambda rng: rng.uniform(low, high))
        case "normal", [mean, deviation] if mean >= 1:
            return Lengths(text, lambda rng: rng.gauss(mean, deviation))
        case "lognormal", [median, sigma] if median >= 1 and sigma <= 10:
            return Lengths(text, lambda rng: rng.lognormvariate(math.log(median), sigma))
    raise ConfigError(
        key,
        f"{text!r} is none of N, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA and choice:N:N:…, "
        "with at least one token",
    )
