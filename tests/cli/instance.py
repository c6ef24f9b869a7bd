"""Runs `headrace up` with services that only pretend, so that the command itself is what is tested."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from headrace_cli.ps_command import Listed
from headrace_shared.python_module import python_module

FAKES = Path(__file__).parent / "fake_services"
STARTED = "Application startup complete."


class Instance:
    def __init__(self, process: "subprocess.Popen[bytes]", data_dir: Path, port: int, output: Path) -> None:
        self.process = process
        self.data_dir = data_dir
        self.port = port
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.output}"
            assert self.process.poll() is None or text in self.output, self.output
            time.sleep(0.05)

    def ps(self) -> list[Listed]:
        command = [sys.executable, "-m", "headrace_cli", "ps", "--json", "--data-dir", str(self.data_dir)]
        done = subprocess.run(command, capture_output=True, timeout=20, check=True)
        return msgspec.json.decode(done.stdout, type=list[Listed])

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=30)


@contextlib.contextmanager
def instance(tmp_path: Path, *arguments: str, **environment: str) -> Iterator[Instance]:
    """Starts `headrace up`; kills it at the end if it still runs, and checks that nothing is left of it."""
    port, data_dir, output = free_port(), tmp_path / "data", tmp_path / "up.out"
    command = python_module("headrace_cli", "up", "--port", str(port), "--data-dir", str(data_dir), *arguments)
    paths = [str(FAKES), *sys.path]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HEADRACE_TEST": str(tmp_path)}
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**environ, **environment}, cwd=tmp_path
        )
    try:
        yield Instance(process, data_dir, port, output)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        wait_until_gone(tmp_path)


def wait_until_gone(tmp_path: Path, timeout_s: float = 30.0) -> None:
    """Fails if a process of this test is left; they are known by their environment."""
    deadline = time.monotonic() + timeout_s
    while left := processes_of(tmp_path):
        assert time.monotonic() < deadline, f"left behind: {[process.cmdline() for process in left]}"
        time.sleep(0.05)


def processes_of(tmp_path: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("HEADRACE_TEST") == str(tmp_path):
                found.append(process)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
