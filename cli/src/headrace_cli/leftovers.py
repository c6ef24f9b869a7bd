"""Processes of an instance that was killed.

Its end ends them, too (`tether.py`), but not at once, not where they are frozen, and only on Linux. Whoever comes next
in the same data folder would meet them: at its port, and at the broker's store.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from headrace_cli.errors import CommandError
from headrace_cli.state_file import ProcessState, is_running, stored_state

PATIENCE_S = 5.0
"""For them to end by themselves: a broker closes its store."""
KILL_S = 5.0
POLL_S = 0.05


async def end_leftovers(data_dir: Path, say: Callable[[str], None]) -> None:
    """Returns when nothing runs that is named in the state file of an instance that does not run any more. Raises
    CommandError."""
    left = _leftovers(data_dir)
    if not left:
        return
    say(f"An earlier `headrace up` was killed; waiting for the end of {len(left)} of its processes.")
    left = await _remaining(left, PATIENCE_S)
    for each in left:
        say(f"Ending {each.service} with pid {each.pid}.")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(each.pid, signal.SIGKILL)
    if left := await _remaining(left, KILL_S):
        pids = ", ".join(str(each.pid) for each in left)
        raise CommandError(f"processes of an earlier `headrace up` still run here: {pids}", "end them")


def _leftovers(data_dir: Path) -> list[ProcessState]:
    state = stored_state(data_dir)
    if state is None or is_running(state.pid, state.birth):
        return []
    return [each for each in state.processes if each.pid > 1 and is_running(each.pid, each.birth)]


async def _remaining(left: list[ProcessState], timeout_s: float) -> list[ProcessState]:
    until = time.monotonic() + timeout_s
    while True:
        left = [each for each in left if is_running(each.pid, each.birth)]
        if not left or time.monotonic() >= until:
            return left
        await asyncio.sleep(POLL_S)
