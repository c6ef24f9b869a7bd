"""Memory and disk while every request brings a schema that nobody has sent before.

    python -m benchmarks.unique_schemas [NUMBER]

The router's checks (its own process and the one that compiles) and the worker's compiler get NUMBER schemas (100,000),
each with properties of new names. Prints resident memory, and what has been written to disks, along the way. A cache
without a bound would grow by some hundred megabytes. Ends with exit code 1 if one of them has grown by more than
`FLAT_MIB` since a tenth of the schemas had come: caches are full by then.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace_router.grammar_checks import GrammarChecks
from headrace_router.grammar_process import grammar_of
from headrace_router.structured_output import OutputForm
from headrace_shared.messages import SamplingParams
from headrace_worker.constraint import Constraint, Constraints
from tests.router.byte_card import CARD
from tests.worker.engine_driver import make_admission

NUM_SHOWN = 10
NUM_AT_A_TIME = 4
ONE_IN_LARGE = 50
FLAT_MIB = 16.0


def schemas(number: int) -> Iterator[str]:
    """One in `ONE_IN_LARGE` has some ten kilobytes."""
    for i in range(number):
        words = [f"{i}-{word}" for word in range(2 if i % ONE_IN_LARGE else 1000)]
        properties = {f"field{i}": {"type": "string", "maxLength": 20}, "other": {"enum": words}}
        yield json.dumps({"type": "object", "properties": properties, "required": list(properties)})


class Use(NamedTuple):
    """Of one process."""

    memory_mib: float
    written_mib: float
    """To disks, since it began."""


def use(pid: int) -> Use:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    written = next(line for line in Path(f"/proc/{pid}/io").read_text().splitlines() if line.startswith("write_bytes"))
    return Use(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, int(written.split()[1]) / 2**20)


class Course:
    """Of some processes, told `NUM_SHOWN` times along the way."""

    def __init__(self, number: int, *names: str) -> None:
        self._number, self._names = number, names
        self._started_at = time.monotonic()
        self.told: list[tuple[Use, ...]] = []

    def at(self, count: int, *pids: int) -> None:
        """`count` schemas are done."""
        if count * NUM_SHOWN // self._number == (count - 1) * NUM_SHOWN // self._number:
            return
        self.told.append(tuple(use(pid) for pid in pids))
        figures = ", ".join(
            f"{name} {memory_mib:.1f} MiB, {written_mib:.1f} MiB written"
            for name, (memory_mib, written_mib) in zip(self._names, self.told[-1], strict=True)
        )
        print(f"{count:8,} schemas {time.monotonic() - self._started_at:7.0f} s: {figures}", flush=True)

    @property
    def is_flat(self) -> bool:
        pairs = zip(self.told[0], self.told[-1], strict=True)
        return all(after[i] - before[i] <= FLAT_MIB for before, after in pairs for i in range(len(before)))


async def in_the_router(number: int) -> Course:
    checks, course, count = GrammarChecks(), Course(number, "router", "its compiling process"), 0
    coming = schemas(number)

    async def client() -> None:
        nonlocal count
        for schema in coming:
            await checks.check(CARD, OutputForm("json", schema, "schema"))
            count += 1
            helper = checks._helper
            assert helper is not None
            course.at(count, os.getpid(), helper.pid)

    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_AT_A_TIME):
                clients.create_task(client())
    finally:
        await checks.close()
    return course


def in_the_worker(number: int) -> Course:
    constraints, course = Constraints(CARD, 1), Course(number, "worker's compiler")
    for count, schema in enumerate(schemas(number), start=1):
        admission = make_admission([1], SamplingParams(seed=1, grammar=grammar_of("json", schema)))
        constraint = constraints.of(admission)
        assert isinstance(constraint, Constraint) and constraint.matcher is not None
        constraints.masks([constraint])
        course.at(count, os.getpid())
    return course


def main(number: int) -> int:
    courses = asyncio.run(in_the_router(number)), in_the_worker(number)
    is_flat = all(course.is_flat for course in courses)
    print("flat" if is_flat else f"not flat: more than {FLAT_MIB:.0f} MiB since the first tenth")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
