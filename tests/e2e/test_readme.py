"""What README.md tells people to type."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_cli.settings import UpSettings
from headrace_router.settings import RouterSettings
from headrace_shared.settings import load_settings
from headrace_worker.settings import WorkerSettings
from tests.e2e.launcher import Launched

pytestmark = [pytest.mark.model, pytest.mark.e2e, pytest.mark.nats]

ANSWER = "The capital of France is Paris."
README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> Iterator[str]:
    """The fenced pieces of that language, in their order."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        if match[1] == language:
            yield match[2]


def at(system: Launched, example: str) -> str:
    return example.replace("http://127.0.0.1:8000", system.url)


def test_the_python_examples_run_as_they_stand(system: Launched, tmp_path: Path) -> None:
    asking, batch = (at(system, block) for block in blocks("python"))
    # The second one goes on with the first one's client.
    done = subprocess.run(
        [sys.executable, "-c", asking + "\nprint('\\f')\n" + batch],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said, _, answered = done.stdout.partition("\f\n")
    assert said.strip() == ANSWER
    (line,) = map(json.loads, answered.split("\n\n")[0].splitlines())
    assert line["custom_id"] == "1" and line["response"]["body"]["choices"][0]["message"]["content"] == ANSWER


def test_the_first_curl_example_runs_as_it_stands(system: Launched) -> None:
    example = next(block for block in blocks("") if "curl " in block)
    done = subprocess.run(["bash", "-c", at(system, example)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("data: [DONE]"), done


def test_every_command_that_is_named_exists() -> None:
    named = set(re.findall(r"^(?:\| `|)headrace ([a-z-]+)", README, re.MULTILINE))
    listed = subprocess.run([sys.executable, "-m", "headrace_cli", "help"], capture_output=True, text=True, check=True)
    known = {line.split()[0] for line in listed.stdout.splitlines() if line.startswith("  ")}
    assert named <= known and {"up", "flood", "explain"} <= named, sorted(named - known)


def test_the_file_of_settings_is_one(tmp_path: Path) -> None:
    (example,) = blocks("yaml")
    path = tmp_path / "headrace.yaml"
    path.write_text(example)
    up = load_settings(UpSettings, ["--config", str(path)], {}, prog="headrace up")
    router = load_settings(RouterSettings, ["--config", f"{path}#router"], {}, prog="headrace-router")
    worker = load_settings(WorkerSettings, ["--config", f"{path}#worker"], {}, prog="headrace-worker")
    assert (up.port, up.routers, router.max_wait_s, worker.quantization) == (8100, 2, 20.0, "int8")
