"""Runs a target with mutated input: only its own errors may come out, soon, and without much memory."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from tests.fuzz.mutation import Mutate

SLOW_S = 2.0
"""Generous: machines that run tests are busy."""
MAX_FAILURES = 20
MAX_INPUT_BYTES = 1 << 20


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
    slowest_s: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


def fuzz(target: Target, random: Random, num_runs: int, findings: Findings) -> None:
    for _ in range(num_runs):
        data = random.choice(target.seeds)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            data = target.mutate(random, data)[:MAX_INPUT_BYTES]
        run(target, data, findings)


def run(target: Target, data: bytes, findings: Findings) -> None:
    started_at = time.perf_counter()
    problem = ""
    try:
        target.run(data)
        findings.num_accepted[target.name] += 1
    except target.errors:
        pass
    except BaseException as error:  # panics of Rust code are no Exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        problem = f"{type(error).__name__}: {error!s:.300}"
    elapsed_s = time.perf_counter() - started_at
    findings.num_runs[target.name] += 1
    findings.slowest_s[target.name] = max(elapsed_s, findings.slowest_s.get(target.name, 0.0))
    if not problem and elapsed_s > SLOW_S:
        problem = f"took {elapsed_s:.1f} s"
    if problem and len(findings.failures) < MAX_FAILURES:
        findings.failures.append(Failure(target.name, problem, data))
