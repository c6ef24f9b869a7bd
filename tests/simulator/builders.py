"""Workers and traffic for tests of the simulator."""

from typing import Any

import numpy as np

from headrace_simulator.arrivals import Arrivals
from headrace_simulator.plan import make_kind
from headrace_simulator.settings import SimulateSettings
from headrace_simulator.workers import WorkerKind


def kind(**settings: Any) -> WorkerKind:
    return make_kind(SimulateSettings(**settings))


def arrivals(count: int, prompt: int = 1000, answer: int = 200) -> Arrivals:
    return Arrivals(np.full(count, prompt, np.int64), np.full(count, answer, np.int64))
