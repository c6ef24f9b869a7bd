"""Whose turn it is on cores that services share with an engine (Linux only).

The threads of an engine wait for each other a hundred times in an iteration: whoever takes a core from one of them
stops all. By default a process that wakes up does just that, and a service wakes up for a few microseconds of work.
Where engines compute elsewhere it is right so: there nobody waits longer than he must.
"""

import contextlib
import os
import sys


def give_way() -> None:
    """From now on this process, and what it starts, takes no core from a thread that computes. It runs on a core that
    is free, or when that thread's turn is over, which is some milliseconds. Who has chosen another policy keeps it."""
    _change("SCHED_OTHER", "SCHED_BATCH")


def keep_turn() -> None:
    """Undoes what a parent's `give_way` has left: for processes that compute."""
    _change("SCHED_BATCH", "SCHED_OTHER")


def _change(before: str, after: str) -> None:
    if sys.platform == "linux" and os.sched_getscheduler(0) == getattr(os, before):
        with contextlib.suppress(OSError):  # a system that does not allow it: everything stays as it is
            os.sched_setscheduler(0, getattr(os, after), os.sched_param(0))
