"""Runs a target with mutated input: only its own errors may come out, soon, and without much memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from tests.fuzz.cost import Cost, Meter, settle
from tests.fuzz.mutation import Mutate

SLOW_S = 5.0
"""Of processor time. Generous: machines that run tests are slow and busy."""
NUM_ALONE = 2
"""What seems to be slow is called so if it is slow so many times more, with nothing else going on."""
MAX_FAILURES = 20
MAX_INPUT_BYTES = 1 << 20
MAX_GROWTH_MIB = 256
"""By one input, which is no larger than the above."""


class Target(NamedTuple):
    name: str
    seeds: Sequence[bytes]
    """Valid input."""
    mutate: Mutate
    run: Callable[[bytes], None]
    errors: tuple[type[Exception], ...]
    """What may come out."""


class Failure(NamedTuple):
    target: str
    what: str
    data: bytes


@dataclass
class Findings:
    num_runs: Counter[str] = field(default_factory=Counter)
    num_accepted: Counter[str] = field(default_factory=Counter)
    """Inputs in which nothing was wrong: a target that has none, or only such, tests nothing."""
    num_doubted: Counter[str] = field(default_factory=Counter)
    """Inputs that were measured again."""
    slowest_s: dict[str, float] = field(default_factory=dict)
    growth_mib: dict[str, int] = field(default_factory=dict)
    """Of the process' peak of memory, at most, by one run."""
    failures: list[Failure] = field(default_factory=list)

    def note(self, target: str, spent_s: float, growth_mib: int) -> str:
        """What is wrong with that; empty if nothing is."""
        self.num_runs[target] += 1
        self.slowest_s[target] = max(spent_s, self.slowest_s.get(target, 0.0))
        self.growth_mib[target] = max(growth_mib, self.growth_mib.get(target, 0))
        is_too_much = spent_s > SLOW_S or growth_mib > MAX_GROWTH_MIB
        return f"took {spent_s:.1f} s, {growth_mib} MiB" if is_too_much else ""

    def fail(self, target: str, problem: str, data: bytes) -> None:
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(Failure(target, problem, data))


def fuzz(target: Target, random: Random, num_runs: int, findings: Findings) -> None:
    for _ in range(num_runs):
        data = random.choice(target.seeds)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            data = target.mutate(random, data)[:MAX_INPUT_BYTES]
        run(target, data, findings)


def run(target: Target, data: bytes, findings: Findings) -> None:
    meter = Meter()
    is_accepted, problem = _attempt(target, data)
    cost = meter.read()
    findings.num_accepted[target.name] += is_accepted
    spent_s = cost.thread_s
    if not problem and is_doubtful(cost):
        findings.num_doubted[target.name] += 1
        spent_s = _time_alone(target, data)
    too_much = findings.note(target.name, spent_s, cost.growth_mib)
    if problem or too_much:
        findings.fail(target.name, problem or too_much, data)


def is_doubtful(cost: Cost) -> bool:
    # Work may be another thread's, too, while this one waits: then it is the process' time that tells.
    return cost.process_s > SLOW_S


def _attempt(target: Target, data: bytes) -> tuple[bool, str]:
    """Whether it was accepted; what is wrong."""
    try:
        target.run(data)
    except target.errors:
        return False, ""
    except BaseException as error:  # panics of Rust code are no Exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return False, f"{type(error).__name__}: {error!s:.300}"
    return True, ""


def _time_alone(target: Target, data: bytes) -> float:
    """The least of several: what is slow stays slow."""
    least_s = float("inf")
    for _ in range(NUM_ALONE):
        settle()
        meter = Meter()
        _attempt(target, data)
        least_s = min(least_s, meter.read().process_s)
    return least_s
