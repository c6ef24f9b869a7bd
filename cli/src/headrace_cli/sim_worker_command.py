"""`headrace sim-worker`: a worker process whose engine takes a GPU's time and computes nothing."""

import os
import sys
from collections.abc import Sequence

from headrace_shared.python_module import python_module


def run(argv: Sequence[str]) -> int:
    """Becomes that process, which takes the worker's own settings."""
    os.execv(sys.executable, python_module("headrace_worker", "--engine", "timing", *argv))
