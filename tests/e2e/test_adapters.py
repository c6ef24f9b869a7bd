"""Adapters and embeddings of a whole system with the real model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from tests.e2e.conftest import ADAPTERS
from tests.e2e.launcher import Launched
from tests.worker.adapters.peft_files import SMOLLM2_135M, write_adapter

pytestmark = [pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

MODEL = "smollm2-135m"
PROMPT = "The capital of France is"


@pytest.fixture
def client(system: Launched) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=system.url, timeout=60.0, trust_env=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def admin(system: Launched) -> dict[str, str]:
    command = [sys.executable, "-m", "headrace_cli", "keys", "create", "--name", "root", "--admin", "--json"]
    made = subprocess.run(
        [*command, "--data-dir", str(system.data_dir)], capture_output=True, check=True, timeout=30, env=os.environ
    )
    return {"Authorization": f"Bearer {json.loads(made.stdout)['key']}"}


def say(client: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    reply = client.post("/v1/completions", json=body | fields)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def until_loaded(client: httpx.Client, admin: dict[str, str], name: str, path: str) -> None:
    deadline = time.monotonic() + 30.0
    while True:
        body = {"lora_name": name, "lora_path": path}
        reply = client.post("/v1/load_lora_adapter", json=body, headers=admin)
        if reply.status_code == 200:
            assert "2 of 2" in reply.text, reply.text
            return
        # Until the key is known to the router.
        assert reply.status_code in (401, 403) and time.monotonic() < deadline, reply.text
        time.sleep(0.1)


def test_adapters_live_beside_the_model_and_outlive_a_worker_and_a_scheduler(
    system: Launched, client: httpx.Client, admin: dict[str, str]
) -> None:
    folder = system.data_dir / ADAPTERS
    for seed, name in enumerate(("first", "second")):
        # Large enough to change what is said.
        write_adapter(folder / name, SMOLLM2_135M, rank=8, alpha=32, seed=seed, size=0.02, target_modules="all-linear")
    (folder / "outside").symlink_to(folder.parent)
    base = text_of(say(client, MODEL))
    for name in ("first", "second"):
        until_loaded(client, admin, name, name)
    first, second = (text_of(say(client, name)) for name in ("first", "second"))
    assert len({base, first, second}) == 3
    texts = ((MODEL, base), ("first", first), ("second", second))
    # Nobody's blocks are taken for another's, whatever was computed before.
    for _ in range(2):
        for model, text in texts:
            assert text_of(say(client, model)) == text
    listed = {model["id"]: model["parent"] for model in client.get("/v1/models").json()["data"]}
    assert listed == {MODEL: None, "first": MODEL, "second": MODEL}
    for path in ("../adapters/first", "/etc", "outside", "missing"):
        reply = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path}, headers=admin)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "adapter_refused"), reply.text
    plain = client.post("/v1/embeddings", json={"model": MODEL, "input": PROMPT}).json()["data"]
    other = client.post("/v1/embeddings", json={"model": "first", "input": PROMPT}).json()
    assert other["model"] == "first" and other["data"] != plain

    # Whoever comes after a death has all that is on record.
    for service in ("worker", "scheduler"):
        victim = system.processes(service)[0]
        os.kill(victim["pid"], signal.SIGKILL)
        assert text_of(say(client, "second")) == second
        wait_replaced(system, service, victim["id"])
    for model, text in texts * 2:
        assert text_of(say(client, model)) == text

    for name in ("first", "second"):
        reply = client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=admin)
        assert reply.status_code == 200
    reply = client.post("/v1/completions", json={"model": "second", "prompt": PROMPT})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert text_of(say(client, MODEL)) == base


def wait_replaced(system: Launched, service: str, former: str) -> None:
    deadline = time.monotonic() + 60.0
    while True:
        running = [process for process in system.processes(service) if process["state"] == "ready"]
        if len(running) == 2 and all(process["id"] != former for process in running):
            return
        assert time.monotonic() < deadline, running
        time.sleep(0.2)


def test_embeddings_are_unit_vectors_that_tell_texts_apart(client: httpx.Client) -> None:
    texts = ["A cat sat on the mat.", "A kitten was sitting on a rug.", "Interest rates rose by half a percent."]
    body = {"model": MODEL, "input": texts}
    vectors = [torch.tensor(item["embedding"]) for item in client.post("/v1/embeddings", json=body).json()["data"]]
    assert [vector.shape for vector in vectors] == [(576,)] * 3
    assert all(abs(float(vector.norm()) - 1) < 1e-4 for vector in vectors)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    # Together and alone, before and after the same prompt was computed for an answer: the same bits.
    say(client, MODEL, prompt=texts[0] * 8)
    for text in (texts[0], texts[0] * 8):
        replies = [client.post("/v1/embeddings", json={"model": MODEL, "input": text}) for _ in range(2)]
        assert replies[0].json()["data"] == replies[1].json()["data"]
    alone = client.post("/v1/embeddings", json={"model": MODEL, "input": texts[0]}).json()["data"][0]["embedding"]
    assert alone == vectors[0].tolist()
