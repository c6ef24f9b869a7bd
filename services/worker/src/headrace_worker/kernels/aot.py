"""Compiles every kernel for the GPUs it is for, on a machine that has none, and says what the compiler made of it.

A kernel that keeps values in memory for want of registers (spills), asks for more shared memory than a multiprocessor
has, or lost the matrix instruction that its speed rests on, still computes the right thing: only this tells.

    python -m headrace_worker.kernels.aot [--record FILE] [MODULE…]
"""

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import headrace_worker.kernels as package
from headrace_worker.kernels.specialization import Specialization

SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one program may have, by compute capability (CUDA C++ Programming Guide, table of
technical specifications)."""
MATRIX_INSTRUCTIONS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")


class Record(NamedTuple):
    """What became of one kernel on one GPU."""

    kernel: str
    capability: int
    registers: int
    """A thread."""
    stack: int
    """Bytes a thread keeps in local memory: what was spilled."""
    shared: int
    """Bytes a program needs."""
    matrix: str
    """The matrix instructions found, and how many of each."""
    problems: tuple[str, ...]


def specializations(modules: Sequence[str] = ()) -> list[Specialization]:
    """Those of the named modules of this package, or of all."""
    found: list[Specialization] = []
    for module in modules or sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        if module != "aot":
            contents = importlib.import_module(f"{package.__name__}.{module}")
            found += getattr(contents, "SPECIALIZATIONS", [])
    return found


def compile_for(specialization: Specialization, capability: int) -> Record:
    """ValueError where the specialization does not fit its kernel; errors of the compiler pass through."""
    kernel: Any = specialization.kernel
    names: list[str] = list(kernel.arg_names)
    given = {*specialization.signature, *specialization.constexprs}
    if given != set(names):
        raise ValueError(f"{specialization.name}: arguments {sorted(given ^ set(names))} are missing or unknown")
    divisors = {name: 16 for name, kind in specialization.signature.items() if kind.startswith("*")}
    divisors.update(specialization.attributes)
    source = ASTSource(
        fn=kernel,
        signature={name: specialization.signature.get(name, "constexpr") for name in names},
        constexprs=dict(specialization.constexprs),
        attrs={(names.index(name),): [["tt.divisibility", value]] for name, value in divisors.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(specialization.options))
    registers, stack = _resources(compiled.asm["cubin"])
    counts = {name: compiled.asm["ptx"].count(name) for name in MATRIX_INSTRUCTIONS}
    matrix = ", ".join(f"{name} × {count}" for name, count in counts.items() if count)
    shared = int(compiled.metadata.shared)
    found = problems(specialization, capability, stack=stack, shared=shared, matrix=matrix)
    return Record(specialization.name, capability, registers, stack, shared, matrix, found)


def problems(
    specialization: Specialization, capability: int, *, stack: int, shared: int, matrix: str
) -> tuple[str, ...]:
    """What must not be so."""
    found = []
    if stack:
        found.append(f"spills {stack} bytes a thread")
    if shared > SHARED_LIMITS[capability]:
        found.append(f"needs {shared} bytes of shared memory, of {SHARED_LIMITS[capability]}")
    wanted = specialization.matrix.get(capability)
    if wanted is not None and wanted not in matrix:
        found.append(f"lost {wanted}")
    return tuple(found)


def table(records: Iterable[Record]) -> str:
    lines = [
        "| kernel | GPU | registers | spilled bytes | shared bytes | matrix instructions |",
        "|---|---|---|---|---|---|",
        *(
            f"| {record.kernel} | sm_{record.capability} | {record.registers} | {record.stack} | {record.shared} |"
            f" {record.matrix or '–'} |"
            for record in records
        ),
    ]
    return "\n".join(lines) + "\n"


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) a thread, as the disassembler that comes with triton reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {printed}")
    return int(found[1]), int(found[2])


def _compile(modules: Sequence[str], index: int, capability: int) -> Record:
    # Kernels do not travel between processes; their place in the list does.
    return compile_for(specializations(modules)[index], capability)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compiles every kernel for GPUs that need not be there.")
    parser.add_argument("--record", type=Path, help="write the table to this file, as Markdown")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="of this package; all unless named")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    everything = specializations(options.modules)
    jobs = [(index, capability) for index, item in enumerate(everything) for capability in item.capabilities]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8), mp_context=get_context("spawn")) as pool:
        records = list(pool.map(_compile, repeat(options.modules), *zip(*jobs, strict=True)))
    body = table(records)
    if options.record is not None:
        heading = (
            "# Kernels, compiled ahead of time\n\n"
            f"Made by `python -m headrace_worker.kernels.aot --record FILE` with Triton {triton.__version__}, without a"
            " GPU. A spill, a lost\nmatrix instruction or too much shared memory fails the tests.\n\n"
        )
        options.record.write_text(heading + body)
    sys.stdout.write(body)
    failed = [record for record in records if record.problems]
    for record in failed:
        sys.stderr.write(f"{record.kernel} on sm_{record.capability}: {'; '.join(record.problems)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
