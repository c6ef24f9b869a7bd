"""`headrace up --autoscale`: workers come with the load and go without it, and no request notices."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.launcher import Launched, launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

PERIOD_S = 1.0
BUSY_S = 30.0
"""What a busy machine needs to get the flood into the queue."""
SETTINGS = {
    "HEADRACE_PERIOD_S": str(PERIOD_S),
    "HEADRACE_SCALE_DOWN_AFTER_S": "3",
    "HEADRACE_SCALE_TO_ZERO_AFTER_S": "3",
    "HEADRACE_WARM_UP_S": "5",
    # An answer takes more than a second, four at a time on a worker.
    "HEADRACE_MAX_SEQUENCES": "4",
}
SHAPE = ("--sim", "--gpu", "l4", "--gpu-model", "llama-3.2-1b", "--autoscale", "--max-workers", "3")
NUM_CALLS = 72
CALL = {"model": "smollm2-135m", "prompt": "A headrace is", "max_tokens": 120, "ignore_eos": True}


class Flood:
    """Calls that are in progress; `replies` once they have ended."""

    def __init__(self, url: str, num_calls: int, **options: Any) -> None:
        self._url = url
        self._options = options
        self.replies: list[tuple[int, int]] = []
        """(status, tokens)"""
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(num_calls)]
        for thread in self._threads:
            thread.start()

    def _ask(self, seed: int) -> None:
        reply = httpx.post(f"{self._url}/v1/completions", json={**CALL, **self._options, "seed": seed}, timeout=200)
        tokens = reply.json()["usage"]["completion_tokens"] if reply.status_code == 200 else 0
        self.replies.append((reply.status_code, tokens))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(200)


def workers(system: Launched, *states: str) -> list[dict[str, Any]]:
    return [each for each in system.processes("worker") if each["pid"] and (not states or each["state"] in states)]


def first_start(log: Path) -> float:
    """When the autoscaler first asked for a worker, in Unix seconds."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    starts = [event["timestamp"] for event in events if event["event"] == "starting a worker"]
    return datetime.fromisoformat(starts[0]).timestamp()


def until(what: str, is_so: Callable[[], bool], system: Launched, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        logs = "\n".join(log.read_text()[-3000:] for log in (system.data_dir / "logs").glob("autoscaler*.log"))
        assert time.monotonic() < deadline, f"not {what} after {timeout_s} s: {system.ps()}\n{logs}"
        time.sleep(0.1)


def test_workers_come_with_a_flood_and_go_with_it_even_if_the_autoscaler_dies_meanwhile(tmp_path: Path) -> None:
    with launched(tmp_path, *SHAPE, "--min-workers", "0", environment=SETTINGS) as system:
        log = system.data_dir / "logs" / "autoscaler-1.log"
        until("leading", lambda: "workers can be managed" in log.read_text() or "decision" in log.read_text(), system)
        flood = Flood(system.url, NUM_CALLS)
        flooded_at = time.time()
        until("two workers", lambda: len(workers(system)) >= 2, system)
        # In the middle of their start.
        os.kill(system.pid("autoscaler"), signal.SIGKILL)
        ids: set[str] = set()

        def are_three() -> bool:
            ids.clear()
            ids.update(each["id"] for each in workers(system, "ready"))
            return len(ids) == 3

        until("three workers", are_three, system)
        flood.join()
        assert flood.replies == [(200, 120)] * NUM_CALLS
        # Two that take longer than the calm: one of them moves to the worker that is left.
        long = Flood(system.url, 2, max_tokens=900)
        until("one worker", lambda: len(workers(system)) == 1, system)
        long.join()
        assert long.replies == [(200, 900)] * 2
        until("none", lambda: not system.processes("worker"), system)
        assert {child.pid for child in psutil.Process(system.process.pid).children(recursive=True)} == {
            int(each["pid"]) for each in system.ps() if each["service"] != "up"
        }
        assert len(ids) == 3
        # A router that has never seen a worker of the model knows it nevertheless.
        os.kill(system.pid("router"), signal.SIGKILL)
        system.wait_healthy()
        # The next request waits for a worker that is not there yet.
        assert httpx.get(f"{system.url}/v1/models").json()["data"][0]["id"] == "smollm2-135m"
        reply = httpx.post(f"{system.url}/v1/completions", json=CALL, timeout=100)
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 120
        assert len(workers(system)) == 1
        assert first_start(log) - flooded_at < 2 * PERIOD_S + BUSY_S
        unknown = httpx.post(f"{system.url}/v1/completions", json={**CALL, "model": "other"}, timeout=10)
        assert unknown.status_code == 404
