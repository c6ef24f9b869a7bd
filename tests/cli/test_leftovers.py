"""What an instance that was killed has left running."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace_cli import leftovers
from headrace_cli.errors import CommandError
from headrace_cli.leftovers import end_leftovers
from headrace_cli.state_file import InstanceState, ProcessState, birth_of, is_running, write_state


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def killed_instance(data_dir: Path, pid: int, birth: str, *, up: int = 0) -> None:
    processes = (ProcessState(service="nats", id="nats-1", pid=pid, state="running", birth=birth),)
    state = InstanceState(pid=up, birth=birth_of(up), state="serving", url="", model="tiny", processes=processes)
    write_state(data_dir, state)


async def test_a_frozen_one_is_killed(
    tmp_path: Path, child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.1)
    killed_instance(tmp_path, child.pid, birth_of(child.pid))
    child.send_signal(signal.SIGSTOP)
    said: list[str] = []
    await end_leftovers(tmp_path, said.append)
    assert child.wait() == -signal.SIGKILL
    assert said == [
        "An earlier `headrace up` was killed; waiting for the end of 1 of its processes.",
        f"Ending nats with pid {child.pid}.",
    ]


async def test_one_that_ends_by_itself_is_left_to_it(tmp_path: Path, child: "subprocess.Popen[bytes]") -> None:
    killed_instance(tmp_path, child.pid, birth_of(child.pid))
    waiting = asyncio.create_task(end_leftovers(tmp_path, lambda _: None))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    child.terminate()
    await waiting
    assert child.wait() == -signal.SIGTERM


@pytest.mark.parametrize("case", ["another process has the pid now", "not known when it was started", "it runs"])
async def test_nobody_elses_process_is_touched(tmp_path: Path, child: "subprocess.Popen[bytes]", case: str) -> None:
    birth = {"another process has the pid now": birth_of(os.getpid()), "not known when it was started": ""}
    up = os.getpid() if case == "it runs" else 0
    killed_instance(tmp_path, child.pid, birth.get(case, birth_of(child.pid)), up=up)
    said: list[str] = []
    await end_leftovers(tmp_path, said.append)
    assert child.poll() is None and not said


async def test_what_cannot_be_ended_stops_the_start(
    tmp_path: Path, child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.05)
    monkeypatch.setattr(leftovers, "KILL_S", 0.05)
    monkeypatch.setattr(os, "killpg", lambda *_: None)  # as where it belongs to another user
    killed_instance(tmp_path, child.pid, birth_of(child.pid))
    with pytest.raises(CommandError, match=f"still run here: {child.pid}; end them"):
        await end_leftovers(tmp_path, lambda _: None)


def test_a_process_that_nobody_has_waited_for_runs_no_more(child: "subprocess.Popen[bytes]") -> None:
    birth = birth_of(child.pid)
    assert is_running(child.pid, birth)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(child.pid, birth)


def test_who_runs_is_known_also_after_the_clock_was_set(
    child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The date of a start is the date of the boot and the time since then: it moves with the clock."""
    birth, told = birth_of(child.pid), psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: told(process) + 3600.0)
    assert is_running(child.pid, birth)
