"""Kernels as the compiler makes them for GPUs that need not be there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_worker.kernels.aot import SHARED_LIMITS, Record, problems, specializations, table
from headrace_worker.kernels.rows import SPECIALIZATIONS


@pytest.mark.timeout(300)
def test_every_kernel_compiles_without_spills_and_with_its_matrix_instructions() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "headrace_worker.kernels.aot"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()[2:]
    assert len(rows) == sum(len(item.capabilities) for item in specializations())


def test_a_spill_too_much_memory_and_a_lost_instruction_are_problems() -> None:
    wanting = SPECIALIZATIONS[0]._replace(matrix={90: "wgmma.mma_async"})
    fits = SHARED_LIMITS[90]
    assert problems(wanting, 90, stack=0, shared=fits, matrix="wgmma.mma_async × 8") == ()
    assert problems(wanting, 90, stack=16, shared=fits + 1, matrix="mma.sync × 8") == (
        "spills 16 bytes a thread",
        "needs 232449 bytes of shared memory, of 232448",
        "lost wgmma.mma_async",
    )
    assert problems(wanting, 80, stack=0, shared=0, matrix="") == ()


def test_names_are_unique_so_that_the_table_can_be_read() -> None:
    names = [item.name for item in specializations()]
    assert len(names) == len(set(names))


def test_the_table_has_a_row_a_record() -> None:
    records = [Record("one", 80, 32, 0, 1024, "mma.sync × 4", ()), Record("two", 90, 64, 8, 0, "", ("spills",))]
    assert table(records).splitlines()[2:] == [
        "| one | sm_80 | 32 | 0 | 1024 | mma.sync × 4 |",
        "| two | sm_90 | 64 | 8 | 0 | – |",
    ]


def test_the_record_is_of_these_kernels() -> None:
    """Its figures change with the compiler and are not compared."""
    lines = (Path(__file__).parents[3] / "benchmarks/kernels_aot.md").read_text().splitlines()
    recorded = {tuple(line.strip("| ").split(" | ")[:2]) for line in lines if " | sm_" in line}
    expected = {(item.name, f"sm_{capability}") for item in specializations() for capability in item.capabilities}
    assert recorded == expected, (
        "make it again: python -m headrace_worker.kernels.aot --record benchmarks/kernels_aot.md"
    )
