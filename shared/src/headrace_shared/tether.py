"""Run as a script: becomes a command that ends when its parent does, however the parent ends (Linux only).

    python tether.py PARENT_PID COMMAND ARGUMENT…

A script and not a hook between fork and exec: such hooks may deadlock in a process with threads. Standard library only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tethered(command: list[str]) -> list[str]:
    """The command line that runs `command` as a child of this process, tethered where the system can do it."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before we asked
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
