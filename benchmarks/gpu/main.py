"""Runs every section in a process of its own, each within its own time, and makes one table of what they measured.

    python -m benchmarks.gpu.main [--dry-run] [--only SECTION ...] [--output FOLDER]

Call it through `run.sh`, which brings the Python packages. A section that fails, hangs or lacks a package leaves a line
that says so, and the others run all the same; but if the kernels are wrong, nothing is timed.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.report import Row, markdown, parse


class Section(NamedTuple):
    name: str
    limit_s: float
    packages: tuple[str, ...]
    """Import names, beside torch and numpy."""


ENGINE = ("triton", "msgspec", "msgpack", "safetensors")
SECTIONS = (
    Section("correctness", 120.0, ENGINE),
    Section("kernels", 110.0, ENGINE),
    Section("model", 170.0, ENGINE),
    Section("peers", 90.0, (*ENGINE, "transformers")),
    Section(
        "service",
        95.0,
        (
            *ENGINE,
            "tokenizers",
            "gguf",
            "nats",
            "fastapi",
            "uvicorn",
            "structlog",
            "httptools",
            "httpx",
            "rich",
            "yaml",
        ),
    ),
)
"""Together below ten minutes."""


def missing_packages(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def command(section: Section) -> list[str]:
    return [sys.executable, "-u", "-m", f"benchmarks.gpu.{section.name}"]


def run_section(section: Section, *, dry_run: bool, limit_s: float) -> tuple[list[Row], str | None]:
    """Its rows, and why there are no more of them."""
    environment = dict(os.environ)
    if dry_run:
        environment["TRITON_INTERPRET"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
    rows: list[Row] = []
    last = ""
    started = time.monotonic()
    # In a group of its own: what a section starts ends with it.
    with subprocess.Popen(
        command(section),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        timer = threading.Timer(limit_s, _kill_group, [process.pid])
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                row = parse(line)
                if row is not None:
                    rows.append(row)
                    print(f"  {row.case}: {row.value:.4g} {row.unit} {row.verdict}", flush=True)
                elif line.strip():
                    print(f"  | {line.rstrip()}", flush=True)
                    last = line.strip() if "Error" in line or "Error" not in last else last
            code = process.wait()
        finally:
            timer.cancel()
            _kill_group(process.pid)
    if code == 0:
        return rows, None
    if time.monotonic() - started >= limit_s:
        return rows, f"stopped after {limit_s:.0f} s"
    return rows, f"exit code {code}: {last[:160]}"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def facts(dry_run: bool) -> dict[str, str]:
    versions = []
    for name in ("torch", "triton", "transformers", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "chip": "none: dry run, the figures mean nothing" if dry_run else _chip(),
        "versions": ", ".join([f"Python {sys.version.split()[0]}", *versions]),
    }


def _chip() -> str:
    query = "name,driver_version,memory.total"
    try:
        output = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return output.splitlines()[0]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: tiny sizes, interpreted kernels")
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], help="these sections")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-benchmark"), help="folder for the table")
    parser.add_argument("--limit", type=float, default=1.0, help="factor on every section's time limit")
    arguments = parser.parse_args(argv)
    rows: list[Row] = []
    failures: dict[str, str] = {}
    described = facts(arguments.dry_run)
    for section in SECTIONS:
        if arguments.only and section.name not in arguments.only:
            continue
        if missing := missing_packages(section.packages):
            failures[section.name] = f"needs {', '.join(missing)}: run.sh --prepare brings them"
        elif "correctness" in failures and not arguments.only:
            failures[section.name] = "the kernels have to be right first"
        else:
            print(f"{section.name}:", flush=True)
            found, failure = run_section(section, dry_run=arguments.dry_run, limit_s=section.limit_s * arguments.limit)
            rows += found
            if failure is not None:
                failures[section.name] = failure
        _write(arguments.output, rows, failures, described)
    print(markdown(rows, failures, described))
    return 1 if failures else 0


def _write(folder: Path, rows: Sequence[Row], failures: dict[str, str], described: dict[str, str]) -> None:
    """After every section, so that what was measured survives whatever comes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(markdown(rows, failures, described), encoding="utf-8")
    data = {"facts": described, "rows": [asdict(row) for row in rows], "failures": failures}
    (folder / "table.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
