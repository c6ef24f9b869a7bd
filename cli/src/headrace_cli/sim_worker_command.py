"""`headrace sim-worker`: a worker process whose engine takes a GPU's time and computes nothing."""

import os
import sys
from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Becomes that process, which takes the worker's own settings."""
    command = [sys.executable, "-m", "headrace_worker", "--engine", "timing", *argv]
    os.execv(sys.executable, command)
