"""When conversations begin, in seconds from the start of the flood. Pure: randomness is an argument."""

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from headrace_cli.flood.settings import MAX_REQUESTS
from headrace_shared.errors import ConfigError


class Arrival(NamedTuple):
    at: float
    num_prompt_tokens: int | None = None
    """None: as the settings say."""
    num_output_tokens: int | None = None


class _Traced(msgspec.Struct, frozen=True):
    """One line of a trace, as in the traces published with Mooncake (Qin et al., 2024) and used by other load tools."""

    timestamp: float
    input_length: int
    output_length: int


def poisson(rate: float, duration: float, rng: random.Random) -> Iterator[Arrival]:
    """A Poisson process, given that as many arrive as are expected: independent, evenly distributed times. Left to
    chance, a run of a hundred arrivals would often offer a tenth more or less than it was told to."""
    at = 0.0
    for num_left in range(max(1, round(rate * duration)), 0, -1):
        # The first of so many times that are spread over what is left.
        at += (duration - at) * (1.0 - (1.0 - rng.random()) ** (1.0 / num_left))
        yield Arrival(at)


def constant(rate: float, duration: float) -> Iterator[Arrival]:
    number = 0
    while number / rate < duration:
        yield Arrival(number / rate)
        number += 1


def burst(rate: float, duration: float, size: int) -> Iterator[Arrival]:
    """`size` at once, so that the average is `rate`."""
    for group in constant(rate / size, duration):
        for _ in range(size):
            yield group


def ramp(rate: float, duration: float) -> Iterator[Arrival]:
    """The momentary rate rises from 0 to twice `rate`; the average is `rate`."""
    count = int(rate * duration)
    for number in range(count):
        # The inverse of the number of arrivals up to t, rate * t**2 / duration.
        yield Arrival(((number + 0.5) / count) ** 0.5 * duration)


def traced(lines: Iterable[str], speed: float, duration: float, name: str) -> list[Arrival]:
    """The first `duration` seconds of a trace, played `speed` times as fast. Raises ConfigError naming the line."""
    decoder = msgspec.json.Decoder(_Traced)
    arrivals: list[Arrival] = []
    first: float | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError("--trace", f"{name}, line {number}: {error}") from error
        if entry.input_length < 1 or entry.output_length < 1:
            raise ConfigError("--trace", f"{name}, line {number}: lengths must be at least 1")
        first = entry.timestamp if first is None else first
        at = (entry.timestamp - first) / 1000.0 / speed
        if at < 0.0 or (arrivals and at < arrivals[-1].at):
            raise ConfigError("--trace", f"{name}, line {number}: earlier than the line before")
        if at >= duration:
            break
        if len(arrivals) >= MAX_REQUESTS:
            raise ConfigError("--trace", f"{name} has more than {MAX_REQUESTS} arrivals")
        arrivals.append(Arrival(at, entry.input_length, entry.output_length))
    if not arrivals:
        raise ConfigError("--trace", f"{name} holds no arrivals")
    return arrivals
