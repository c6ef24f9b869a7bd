"""What the live page costs a router: its processor time with the page on and watched, and with the page off.

    python -m benchmarks.dashboard [--workers 40] [--seconds 20]

Simulated workers, so that the fleet may be large; nothing is asked of it meanwhile.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from headrace_shared.broker_permissions import Role
from tests.e2e.launcher import Launched, launched

READY_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    shares = {is_on: measure(is_on, given.workers, given.seconds) for is_on in (False, True)}
    print(f"{given.workers} workers, {given.seconds:.0f} s: off {shares[False]:.2%} of a core, on {shares[True]:.2%}")
    print(f"the live page: {shares[True] - shares[False]:.2%} of a core")


def measure(is_on: bool, num_workers: int, seconds: float) -> float:
    """Seconds of processor time a second."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"HEADRACE_DASHBOARD": str(is_on).lower()}
        with (
            launched(Path(folder), "--sim", "--workers", "1", environment=environment) as system,
            more_workers(system, num_workers - 1),
            watching(system, is_on),
        ):
            router = psutil.Process(system.pid("router"))
            threading.Event().wait(5.0)
            before = router.cpu_times()
            threading.Event().wait(seconds)
            after = router.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


@contextlib.contextmanager
def more_workers(system: Launched, count: int) -> Iterator[None]:
    """All in one process; ready when this returns."""
    if count < 1:
        yield
        return
    environment = {**os.environ, "HEADRACE_NATS_URL": system.nats_url(), "HEADRACE_WORKERS": str(count)}
    environment["HEADRACE_BROKER_CREDENTIALS"] = system.key_file(Role.WORKER)
    command = [sys.executable, "-m", "headrace_worker", "--engine", "timing", "--health-port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        before = httpx.get(f"{system.url}/health").json()["workers"]
        deadline = time.monotonic() + READY_S
        while httpx.get(f"{system.url}/health").json()["workers"] < before + count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{count} more workers are not ready after {READY_S} s")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def watching(system: Launched, is_on: bool) -> Iterator[None]:
    """A page that is open."""
    if not is_on:
        yield
        return
    has_ended = threading.Event()

    def read() -> None:
        with httpx.stream("GET", f"{system.url}/dashboard/api/live", timeout=30) as response:
            for line in response.iter_lines():
                if line.startswith("event: frame") and has_ended.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


if __name__ == "__main__":
    main()
