"""`headrace simulate` as a user runs it."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace_simulator.__main__ import Report

SMALL = ("--gpus", "20", "--hours", "0.25", "--start-hour", "9", "--max-requests-per-step", "200")


def run(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "headrace_cli", "simulate", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_a_report_with_plots_of_every_policy(tmp_path: Path) -> None:
    done = run(*SMALL, "--out", str(tmp_path / "report"), "--policies", "own,fixed-peak,lag-threshold")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:4]] == ["own", "fixed-peak", "lag-threshold"]
    report = msgspec.json.decode((tmp_path / "report" / "report.json").read_bytes(), type=Report)
    assert [each.policy for each in report.results] == ["own", "fixed-peak", "lag-threshold"]
    assert len({each.num_requests for each in report.results}) == 1
    for result in report.results:
        series = result.series
        assert len(series.minutes) == 15 and series.minutes[-1] == pytest.approx(15.0)
        assert {len(getattr(series, name)) for name in series.__struct_fields__} == {15}
        assert result.num_requests > 10_000 and 0 < result.cost < 20 * 0.25 + 0.1
    svg = (tmp_path / "report" / "fleet.svg").read_text()
    assert svg.startswith("<?xml") and "</svg>" in svg
    assert (tmp_path / "report" / "fleet.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_file_is_a_day_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{number / 10},{500 + number % 700},{50 + number % 90}\n" for number in range(3000))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    done = run("--gpus", "8", "--trace", str(path), "--policies", "fixed-peak")
    assert done.returncode == 0, done.stderr
    assert "fixed-peak" in done.stdout


def test_token_by_token_a_few_workers_under_the_own_policy() -> None:
    done = run("--detail", "tokens", "--gpus", "2", "--hours", "0.006", "--policies", "own", "--step-s", "0.5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("own")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--gpu", "h999"), "gpu: 'h999' is none of"),
        (("--gpu-model", "llama-3.1-70b"), "gpu_model: llama-3.1-70b needs 141 GB"),
        (("--policies", "magic"), "policies: magic is none of own"),
        (("--gpus", "3", "--gpus-per-worker", "4"), "gpus: fewer than the 4 of one worker"),
        (("--detail", "tokens"), "detail: tokens: too much load"),
        (("--trace", "/nowhere.csv"), "trace: cannot read /nowhere.csv"),
        (("--peak", "0"), "--peak"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(flags: tuple[str, ...], problem: str) -> None:
    done = run(*flags)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("headrace simulate: ") and problem in done.stderr
