"""The GPU benchmark as a program: sections that fail, hang or lack packages, and its table."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import main as program
from benchmarks.gpu.main import SECTIONS, Section
from benchmarks.gpu.report import Row, emit, markdown, parse

PROGRAMS = {
    "good": "from benchmarks.gpu.report import Row, emit\nprint('text')\nemit(Row('good', 'one', 2.0, 'ms'))",
    "wrong": "from benchmarks.gpu.report import Row, emit\n"
    "emit(Row('wrong', 'one', 1.0, 'ms'))\nraise ValueError('no')",
    "stuck": "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "from benchmarks.gpu.report import Row, emit\nemit(Row('stuck', 'one', 1.0, 'ms'))\ntime.sleep(600)",
}


@pytest.fixture
def sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the program run three small ones, in place of the real sections."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(program, "command", lambda section: [sys.executable, str(folder / f"{section.name}.py")])
    monkeypatch.setenv("PYTHONPATH", ".")
    monkeypatch.setattr(
        program,
        "SECTIONS",
        (
            Section("wrong", 30.0, ()),
            Section("absent", 30.0, ("no_such_package",)),
            Section("stuck", 3.0, ()),
            Section("good", 30.0, ("json",)),
        ),
    )
    return tmp_path


def test_what_fails_or_hangs_keeps_its_rows_and_stops_nobody_else(sections: Path) -> None:
    started = time.monotonic()
    assert program.main(["--output", str(sections / "out"), "--dry-run"]) == 1
    assert time.monotonic() - started < 60
    data = json.loads((sections / "out" / "table.json").read_text())
    assert [row["section"] for row in data["rows"]] == ["wrong", "stuck", "good"]
    assert set(data["failures"]) == {"wrong", "absent", "stuck"}
    assert "ValueError: no" in data["failures"]["wrong"]
    assert "no_such_package" in data["failures"]["absent"] and "--prepare" in data["failures"]["absent"]
    assert "3 s" in data["failures"]["stuck"]
    table = (sections / "out" / "table.md").read_text()
    assert "| absent | | not measured |" in table and "dry run" in table


def test_nothing_is_timed_if_the_kernels_are_wrong(sections: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {section.name: section for section in program.SECTIONS}
    (sections / "scripts" / "correctness.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(program, "SECTIONS", (Section("correctness", 30.0, ()), chosen["good"]))
    assert program.main(["--output", str(sections / "out"), "--dry-run"]) == 1
    data = json.loads((sections / "out" / "table.json").read_text())
    assert not data["rows"] and set(data["failures"]) == {"correctness", "good"}


def test_all_sections_together_take_less_than_ten_minutes() -> None:
    assert sum(section.limit_s for section in SECTIONS) <= 590.0
    assert SECTIONS[0].name == "correctness"


def test_rows_survive_their_way_out_of_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("a", "one", 0.5, "ms", 0.91, "copy bandwidth", 0.85),
        Row("a", "two", 1234.5, "GB/s", 0.2, "time", 0.05, target_is_most=True, note="why"),
        Row("b", "three", 0.0, ""),
    ]
    for row in rows:
        emit(row)
    assert [parse(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert parse("ordinary output") is None
    table = markdown(rows, {"c": "reason"}, {"chip": "none"})
    assert "| a | one | 0.5 ms | 91% of copy bandwidth | ≥ 85% | met |" in table
    assert "| a | two | 1,234 GB/s | 20% of time | ≤ 5% | missed, why |" in table
    assert "| b | three | 0  |  |  |  |" in table
    assert "| c | | not measured | | | reason |" in table


def test_the_script_runs_every_kernel_without_a_gpu(tmp_path: Path) -> None:
    """The sections that need neither a broker nor another library; the others are the same code as elsewhere."""
    output = subprocess.run(
        ["benchmarks/gpu/run.sh", "--dry-run", "--only", "correctness", "--limit", "3", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=115,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": str(tmp_path)},
    )
    data = json.loads((tmp_path / "table.json").read_text())
    assert output.returncode == 0 and not data["failures"], output.stdout[-3000:]
    assert {row["section"] for row in data["rows"]} == {"correctness"}
