"""`headrace up --sim`: the whole system around workers that only take a GPU's time."""

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.launcher import launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

CALL = {"model": "smollm2-135m", "prompt": "A headrace is", "seed": 5, "max_tokens": 300, "ignore_eos": True}


def test_a_simulated_system_answers_and_survives_the_death_of_a_worker(tmp_path: Path) -> None:
    shape = ("--sim", "--gpu", "l4", "--gpu-model", "llama-3.2-1b", "--workers", "2", "--no-autoscaler")
    with launched(tmp_path, *shape) as system:
        said = system.log.read_text()
        assert "worker-1: simulated, 16-bit floats, KV cache for " in said
        states = [line for line in said.splitlines() if line.startswith("router-1: ")]
        assert states[-1] == "router-1: ready", "what it said before its workers were ready is not the last word"
        answer = httpx.post(f"{system.url}/v1/completions", json=CALL, timeout=120).json()
        assert answer["usage"]["completion_tokens"] == 300
        again: list[str] = []

        def ask() -> None:
            reply = httpx.post(f"{system.url}/v1/completions", json=CALL, timeout=120)
            again.append(reply.json()["choices"][0]["text"])

        # One for each worker.
        clients = [threading.Thread(target=ask) for _ in range(2)]
        for client in clients:
            client.start()
        time.sleep(1.0)  # of about 3.5: 11 ms a token
        assert not again
        os.kill(system.pid("worker"), signal.SIGKILL)
        for client in clients:
            client.join(120)
        assert again == [answer["choices"][0]["text"]] * 2
