"""Memory while every request brings a schema that nobody has sent before.

    python -m benchmarks.unique_schemas [NUMBER]

The router's checks (its own process and the one that compiles) and the worker's compiler get NUMBER schemas (100,000),
each with a property of a new name. Prints resident memory along the way; a cache without a bound would grow by some
hundred megabytes.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator

from headrace_router.grammar_checks import GrammarChecks
from headrace_router.grammar_process import grammar_of
from headrace_router.structured_output import OutputForm
from headrace_shared.messages import SamplingParams
from headrace_worker.constraint import Constraint, Constraints
from tests.router.test_grammar_checks import CARD
from tests.worker.engine_driver import make_admission

NUM_SHOWN = 10


def schemas(number: int) -> Iterator[str]:
    for i in range(number):
        properties = {f"field{i}": {"type": "string", "maxLength": 20}, "other": {"enum": [f"a{i}", f"b{i}"]}}
        yield json.dumps({"type": "object", "properties": properties, "required": list(properties)})


def memory_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def in_the_router(number: int) -> list[tuple[float, float]]:
    """(router, process that compiles) in MiB, `NUM_SHOWN` times along the way."""
    checks = GrammarChecks()
    told = []
    try:
        for i, schema in enumerate(schemas(number), start=1):
            await checks.check(CARD, OutputForm("json", schema, "schema"))
            if i % (number // NUM_SHOWN) == 0:
                process = checks._process
                assert process is not None
                told.append((memory_mib(os.getpid()), memory_mib(process.pid)))
    finally:
        await checks.close()
    return told


def in_the_worker(number: int) -> list[float]:
    """MiB, `NUM_SHOWN` times along the way."""
    constraints = Constraints(CARD, 1)
    told = []
    for i, schema in enumerate(schemas(number), start=1):
        admission = make_admission([1], SamplingParams(seed=1, grammar=grammar_of("json", schema)))
        constraint = constraints.of(admission)
        assert isinstance(constraint, Constraint) and constraint.matcher is not None
        constraints.masks([constraint])
        if i % (number // NUM_SHOWN) == 0:
            told.append(memory_mib(os.getpid()))
    return told


def main(number: int) -> None:
    for router, process in asyncio.run(in_the_router(number)):
        print(f"router {router:7.1f} MiB, its compiling process {process:7.1f} MiB")
    for worker in in_the_worker(number):
        print(f"worker's compiler {worker:7.1f} MiB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
