"""Runs `headrace up` as a user does and finds its processes through `headrace ps --json`."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from headrace_shared.broker_credentials import key_path
from headrace_shared.broker_permissions import Role
from headrace_shared.nats_bus import NatsBus

STARTED = "Application startup complete."
MAX_ROUTERS = 4
"""Routers beyond the first take the ports after the first one's."""


class Launched:
    """A running system. `url` is the first router's base URL."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, data_dir: Path, log: Path) -> None:
        self.process = process
        self.port = port
        self.data_dir = data_dir
        self.log = log
        self.url = f"http://127.0.0.1:{port}"

    def ps(self) -> list[dict[str, Any]]:
        """Every process of the system: service, id, pid, state, model, port."""
        output = subprocess.run(
            [sys.executable, "-m", "headrace_cli", "ps", "--json", "--data-dir", str(self.data_dir)],
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        listed: list[dict[str, Any]] = json.loads(output)
        return listed

    def processes(self, service: str) -> list[dict[str, Any]]:
        return [process for process in self.ps() if process["service"] == service]

    def pid(self, service: str, which: int = 0) -> int:
        return int(self.processes(service)[which]["pid"])

    def nats_url(self) -> str:
        return (self.data_dir / "broker-url").read_text().strip()

    def key_file(self, role: Role) -> str:
        """With which this start of the broker lets somebody in."""
        return str(key_path(self.data_dir / "credentials", role))

    async def bus(self, role: Role) -> NatsBus:
        """With the rights of a service."""
        return await NatsBus.connect(
            self.nats_url(), name="test", on_closed=lambda: None, role=role, credentials=self.key_file(role)
        )

    def wait_healthy(self, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            time.sleep(0.2)
        raise AssertionError(f"not healthy after {timeout_s} s:\n{self.log.read_text()[-4000:]}")


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row, below the range that outgoing connections use."""
    for _ in range(100):
        first = random.randrange(12_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError(f"no {count} free ports in a row")


@contextlib.contextmanager
def launched(
    data_dir: Path, *arguments: str, environment: dict[str, str] | None = None, timeout_s: float = 200.0
) -> Iterator[Launched]:
    """Starts the system, waits for its start-up line, and afterwards checks that a SIGINT leaves no process behind."""
    port = free_ports(MAX_ROUTERS)
    log = data_dir / "up.out"
    command = [sys.executable, "-m", "headrace_cli", "up", "--port", str(port), "--data-dir", str(data_dir), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
    system = Launched(process, port, data_dir, log)
    try:
        deadline = time.monotonic() + timeout_s
        while STARTED not in log.read_text():
            assert process.poll() is None, f"headrace up ended with {process.returncode}:\n{log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"not started after {timeout_s} s:\n{log.read_text()[-4000:]}"
            time.sleep(0.1)
        yield system
    finally:
        stop(system)


def stop(system: Launched) -> None:
    pids = [int(entry["pid"]) for entry in system.ps()] if system.process.poll() is None else []
    system.process.send_signal(signal.SIGINT)
    try:
        system.process.wait(timeout=120)
    finally:
        if system.process.poll() is None:
            system.process.kill()
            system.process.wait()
    left = [pid for pid in pids if pid != system.process.pid and Path(f"/proc/{pid}").exists()]
    assert not left, f"processes left behind: {left}\n{system.log.read_text()[-4000:]}"
