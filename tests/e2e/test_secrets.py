"""What is secret is in no log, no command line, no environment, and on disk only as a hash."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.api import MODEL
from tests.e2e.launcher import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats]


def headrace_keys(*arguments: str) -> bytes:
    command = [sys.executable, "-m", "headrace_cli", "keys", *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=30).stdout


def test_an_api_key_is_found_nowhere(scripted: Launched) -> None:
    made = headrace_keys("create", "--name", "canary", "--json", "--data-dir", str(scripted.data_dir))
    key = json.loads(made)["key"]
    secret = key[-43:]
    body = {"model": MODEL, "prompt": '{"text": "abc"}'}
    headers = [{"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"authorization": f"Basic {key}"}]
    headers.append({"authorization": f"Bearer {key[:-1]}{'a' if key[-1] != 'a' else 'b'}"})
    with httpx.Client(base_url=scripted.url, timeout=30, trust_env=False) as client:
        for _ in range(1200):  # a new key is known within moments
            if client.post("/v1/completions", json=body, headers=headers[0]).status_code == 200:
                break
        statuses = {client.post("/v1/completions", json=body, headers=given).status_code for given in headers}
        assert statuses == {200, 401}
        client.post("/v1/completions", content=b"{", headers=headers[0])
        client.get(f"/v1/models?api_key={key}", headers=headers[0])
        for path in (
            "/metrics",
            "/version",
            "/load",
            "/openapi.json",
            "/v1/models",
            "/health",
            "/dashboard/api/requests",
        ):
            reply = client.get(path, headers=headers[0])
            assert secret not in reply.text and secret not in str(reply.headers), path
    for pid in [scripted.process.pid, *(int(process["pid"]) for process in scripted.ps() if process["pid"])]:
        for name in ("cmdline", "environ"):
            assert secret.encode() not in Path(f"/proc/{pid}/{name}").read_bytes(), (pid, name)
    files = [file for file in scripted.data_dir.rglob("*") if file.is_file()]
    assert any(b"listening" in file.read_bytes() for file in files), "the logs are among them"
    for file in files:
        assert secret.encode() not in file.read_bytes(), file
    headrace_keys("revoke", "canary", "--data-dir", str(scripted.data_dir))
