"""Runs a target with mutated input: only its own errors may come out, soon, and without much memory."""

import contextlib
import resource
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
    slowest_s: dict[str, float] = field(default_factory=dict)
    growth_mib: dict[str, int] = field(default_factory=dict)
    """Of the process' peak of memory, at most, by one run."""
    failures: list[Failure] = field(default_factory=list)


def fuzz(target: Target, random: Random, num_runs: int, findings: Findings) -> None:
    for _ in range(num_runs):
        data = random.choice(target.seeds)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            data = target.mutate(random, data)[:MAX_INPUT_BYTES]
        run(target, data, findings)


def run(target: Target, data: bytes, findings: Findings) -> None:
    peak_mib, started_at = peak_memory_mib(), time.process_time()
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
    elapsed_s = time.process_time() - started_at
    if not problem and elapsed_s > SLOW_S:  # a library was loaded, perhaps: what is slow stays slow
        started_at = time.process_time()
        with contextlib.suppress(*target.errors):
            target.run(data)
        elapsed_s = time.process_time() - started_at
    findings.num_runs[target.name] += 1
    findings.slowest_s[target.name] = max(elapsed_s, findings.slowest_s.get(target.name, 0.0))
    growth_mib = peak_memory_mib() - peak_mib
    findings.growth_mib[target.name] = max(growth_mib, findings.growth_mib.get(target.name, 0))
    if not problem and (elapsed_s > SLOW_S or growth_mib > MAX_GROWTH_MIB):
        problem = f"took {elapsed_s:.1f} s, {growth_mib} MiB"
    if problem and len(findings.failures) < MAX_FAILURES:
        findings.failures.append(Failure(target.name, problem, data))


def peak_memory_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
