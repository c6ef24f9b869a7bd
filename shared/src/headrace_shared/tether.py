"""Processes that end when their parent does, however the parent ends (Linux only).

Run as a script, it ties itself to its parent and becomes a command:

    python tether.py PARENT_PID SIGNAL COMMAND ARGUMENT…

A script and not a hook between fork and exec: such hooks may deadlock in a process with threads. Standard library only.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def tethered(command: Sequence[str], number: signal.Signals) -> list[str]:
    """The command line that runs `command` (with the path of its program) as a child of this process, which gets signal
    `number` when this one ends; elsewhere than on Linux just the command."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(number.value), *command]


def end_with_parent(number: signal.Signals) -> None:
    """This process gets signal `number` when its parent ends. Nothing happens elsewhere than on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def main(parent: int, number: signal.Signals, command: list[str]) -> None:
    end_with_parent(number)
    if os.getppid() != parent:  # it ended before we asked
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), signal.Signals(int(sys.argv[2])), sys.argv[3:])
