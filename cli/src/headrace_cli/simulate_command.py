"""`headrace simulate`: starts the simulator, a project of its own."""

import importlib.util
import os
import sys
from collections.abc import Sequence

from headrace_cli.errors import CommandError
from headrace_shared.python_module import python_module

MODULE = "headrace_simulator"


def run(argv: Sequence[str]) -> int:
    """Becomes that process. Raises CommandError if it is not installed."""
    if importlib.util.find_spec(MODULE) is None:
        raise CommandError("the simulator is not installed", "pip install headrace-simulator[plots]")
    os.execv(sys.executable, python_module(MODULE, *argv))
