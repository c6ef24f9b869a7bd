"""What comes in, step by step. Every policy is given the same day: traffic is a function of its seed and the step."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Arrivals(NamedTuple):
    """The requests of one step; of each, how long prompt and answer are in tokens. Where there are more than can be
    simulated one by one, each stands for `Traffic.weight` of them."""

    prompts: Ints
    answers: Ints

    @property
    def num(self) -> int:
        return len(self.prompts)


class Traffic(Protocol):
    @property
    def weight(self) -> int:
        """Requests that each arrival stands for."""
        ...

    @property
    def num_steps(self) -> int: ...

    def arrivals(self, step: int) -> Arrivals: ...

    def rate(self, step: int) -> float:
        """Expected requests a second around that step: what somebody who knew the day would plan with."""
        ...


def nothing() -> Arrivals:
    return Arrivals(np.empty(0, np.int64), np.empty(0, np.int64))
