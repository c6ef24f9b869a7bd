"""One inference server as a group of processes: started until it has answered, measured, stopped."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.client import run
from benchmarks.workload import Job

HOST = "127.0.0.1"
START_TIMEOUT_S = 900.0


class ServerSpec(NamedTuple):
    name: str
    command: Sequence[str]
    """With {port} and {folder}, an empty folder of this start."""
    model: str
    """What requests call it."""
    environment: Mapping[str, str]
    weights: str
    """bf16, or the quantization."""


class Start(NamedTuple):
    """Seconds from the start of the process."""

    listening_s: float
    first_token_s: float


class Server:
    def __init__(self, spec: ServerSpec, port: int, folder: Path) -> None:
        self.spec = spec
        self.port = port
        self.log = folder / "server.log"
        command = [part.format(port=port, folder=folder) for part in spec.command]
        self._started = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )

    async def wait(self) -> Start:
        """Until a request for one token has been answered: being healthy is not enough. Raises RuntimeError."""
        listening_s: float | None = None
        job = Job([1, 2, 3, 4], 1)
        while True:
            elapsed_s = time.monotonic() - self._started
            if self._process.poll() is not None or elapsed_s > START_TIMEOUT_S:
                raise RuntimeError(f"{self.spec.name} did not start:\n{self.log.read_text(errors='replace')[-3000:]}")
            try:
                summary = await run(HOST, self.port, self.spec.model, [job], 1)
            except* RuntimeError:  # it listens, and says that it cannot yet
                listening_s = listening_s or time.monotonic() - self._started
            except* OSError:
                pass
            else:
                if summary.num_complete:
                    first_token_s = time.monotonic() - self._started
                    return Start(listening_s or first_token_s, first_token_s)
            await asyncio.sleep(0.05)

    def peak_memory(self) -> dict[str, int]:
        """Bytes that were resident at most, by what the process is; pages that several map count in each."""
        peaks: dict[str, int] = {}
        for process in self._processes():
            try:
                name = _role(process.cmdline())
                peak = _peak_bytes(process.pid)
            except (psutil.Error, OSError):
                continue
            peaks[name] = peaks.get(name, 0) + peak
        return peaks

    def stop(self) -> None:
        processes = self._processes()
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in psutil.wait_procs(processes, timeout=5)[1]:
            process.kill()

    def _processes(self) -> list[psutil.Process]:
        try:
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _role(command: Sequence[str]) -> str:
    for part in command:
        if part.startswith("headrace_"):
            return part.split(" ")[0]
    return Path(command[0]).name if command else "?"


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
