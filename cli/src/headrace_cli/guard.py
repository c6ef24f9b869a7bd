"""Runs a command that the kernel kills as soon as its parent dies: `python guard.py <parent pid> <command> …`.

This must happen between fork and exec; a `preexec_fn` could deadlock in a process with threads. Linux only; elsewhere
the command runs unguarded. Standard library only, since it starts with each child.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
