"""Images hold what their distribution needs: all of it, extras of other distributions of the project included."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
requirements = runpy.run_path(str(ROOT / "deploy/docker/requirements.py"))["requirements"]

SHARED = """
[project]
name = "headrace-shared"
dependencies = ["msgspec"]
[project.optional-dependencies]
grammar = ["llguidance"]
unasked = ["torch"]
"""
SERVICE = """
[project]
name = "headrace-worker"
dependencies = ["headrace-shared[grammar]==0.1.0", "numpy>=2"]
[project.optional-dependencies]
gpu = ["triton"]
"""


def test_extras_that_one_distribution_asks_of_another_are_needed(tmp_path: Path) -> None:
    for folder, text in (("shared", SHARED), ("worker", SERVICE)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pyproject.toml").write_text(text)
    folders = [str(tmp_path / "shared"), str(tmp_path / "worker")]
    assert requirements(folders) == ["llguidance", "msgspec", "numpy>=2"]
    assert requirements([folders[0], folders[1] + "[gpu]"]) == ["llguidance", "msgspec", "numpy>=2", "triton"]


@pytest.mark.parametrize("service", ["router", "scheduler", "worker", "autoscaler"])
def test_every_service_has_a_list(service: str) -> None:
    script = [sys.executable, str(ROOT / "deploy/docker/requirements.py"), "shared", f"services/{service}"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert "msgspec" in done.stdout.split()
    assert "headrace" not in done.stdout
