"""What tools are run against, how they are run, and what they find."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 600.0


class Target(NamedTuple):
    url: str
    """Without /v1."""
    model: str
    tokenizer: Path
    """A folder in the format of transformers."""
    folder: Path
    """Empty; for a tool's files."""
    tools: Path
    """Where conformance/setup.sh installed them."""
    peers: Path
    """Where peers/setup.sh installed other servers, with their tools."""


class Finding(NamedTuple):
    """What a tool says itself."""

    tool: str
    way: str
    """Which of its ways of asking."""
    version: str
    num_done: int
    """Requests, or tests."""
    num_failed: int
    first_token_ms: float | None = None
    """Mean; None where the tool does not measure it."""
    note: str = ""

    @property
    def is_good(self) -> bool:
        is_plausible = self.first_token_ms is None or self.first_token_ms > 0.1
        return self.num_done > 0 and self.num_failed == 0 and is_plausible


class NotInstalled(Exception):
    """Names the folder that is missing."""


class ToolFailed(Exception):
    """Says what the tool wrote last."""


def binary(venv: Path, name: str) -> Path:
    """Raises NotInstalled."""
    path = venv / "bin" / name
    if not path.exists():
        raise NotInstalled(str(venv))
    return path


def version_of(venv: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return run([binary(venv, "python"), "-c", code]).strip()


def run(
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    accepts: Sequence[int] = (0,),
) -> str:
    """What the command writes to its output. Raises ToolFailed if it ends otherwise than `accepts` says, or never."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_COLOR": "1"}
    env = {**os.environ, **offline, **(environment or {})}
    env.pop("PYTHONPATH", None)
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ToolFailed(f"{words[0]} did not end within {TIMEOUT_S:.0f} s") from error
    if done.returncode not in accepts:
        raise ToolFailed(f"{words[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout
