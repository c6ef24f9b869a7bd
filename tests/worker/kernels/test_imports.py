"""A worker on a CPU must do without triton, which is not installed there."""

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["triton"] = None  # importing it fails
import headrace_worker.engine
import headrace_worker.kernels.quantized_weights
import headrace_worker.kernels.reference
"""


def test_the_engine_and_the_references_need_no_triton() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=100)
