"""A hub id is downloaded, with its progress told, from a hub that answers as the real one does."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http_double import SilentHandler, served, url_of

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 40_000,
    "pytorch_model.bin": b"never fetched",
}
FETCH = (
    "import json, sys\n"
    "from headrace_worker.models.source import find_model\n"
    "told = []\n"
    "found = find_model('owner/name', lambda done, total: told.append((done, total)))\n"
    "print(json.dumps([found.name, str(found.path), told]))\n"
)


class Hub(SilentHandler):
    fetched: set[str] = set()  # noqa: RUF012 - reset by the fixture

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, is_head: bool) -> None:
        name = self.path.rpartition("/")[2].partition("?")[0]
        headers = {"content-type": "application/json"}
        if self.path.startswith("/api/models/owner/name"):
            listing = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            data = json.dumps(listing).encode()
            if "/tree/" in self.path:
                data = json.dumps(
                    [{"type": "file", "path": name, "size": len(file), "oid": "0" * 40} for name, file in FILES.items()]
                ).encode()
        elif self.path.startswith("/owner/name/resolve/") and name in FILES:
            data = FILES[name]
            headers = {"x-repo-commit": COMMIT, "etag": f'"{hashlib.sha256(data).hexdigest()}"'}
            if not is_head:
                self.fetched.add(name)
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if not is_head:
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.fetched.clear()
    with served(Hub) as server:
        yield url_of(server)


def test_a_hub_id_is_downloaded_and_its_progress_told(hub: str, tmp_path: Path) -> None:
    environ = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", FETCH], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    name, path, told = json.loads(done.stdout.splitlines()[-1])
    assert name == "owner/name"
    assert Hub.fetched == {"config.json", "model.safetensors"}
    assert (Path(path) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert told and all(0 < count <= total for count, total in told)
    assert "%" not in done.stderr, "no bar is drawn into the log"
