"""How a process of ours is started."""

import sys


def python_module(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module as a program, with this interpreter. The folder in which it is started is not
    searched for modules: a user's own `queue.py` or `types.py` would be taken for Python's, and anybody's in /tmp."""
    return [sys.executable, "-P", "-m", module, *arguments]
