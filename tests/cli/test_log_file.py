import errno
import os
from pathlib import Path

import pytest

from headrace_cli import log_file
from headrace_cli.log_file import LogFile


def write(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode())


def test_the_last_line_is_of_the_current_life(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log")
    assert log.last_line() == ""
    first = log.open()
    write(first, "one\ntwo\n\n")
    assert log.last_line() == "two"
    second = log.open()
    assert log.last_line() == ""
    write(second, "three")
    assert log.last_line() == "three"
    os.close(first)
    os.close(second)


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "x.log")
    os.close(log.open_if_possible())
    log.path.unlink()
    log.path.parent.rmdir()
    assert log.last_line() == ""
    descriptor = log.open_if_possible()
    write(descriptor, "one")
    os.close(descriptor)
    assert log.last_line() == "one"


def test_a_process_starts_though_its_log_cannot_be_written(tmp_path: Path) -> None:
    """At its restart it would end the whole instance."""
    log = LogFile(tmp_path / "logs" / "x.log")
    log.path.parent.touch()
    descriptor = log.open_if_possible()
    write(descriptor, "one")
    os.close(descriptor)
    log.trim()
    assert log.last_line() == ""


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("\x1b[31mred\x1b[0m\x07\n", "red"),
        ('{"event": "service failed", "reason": "no broker", "level": "error"}\n', "service failed: no broker"),
        (
            '{"event": "service crashed", "exception": [{"exc_type": "ValueError", "exc_value": "3", "frames": []}]}\n',
            "service crashed: ValueError: 3",
        ),
        ('{"other": 1}\n', '{"other": 1}'),
        ("x" * 100_000 + "\n", "x" * 1000),
        ("\xff\n", "ÿ"),
    ],
)
def test_the_last_line_is_for_people(tmp_path: Path, written: str, line: str) -> None:
    log = LogFile(tmp_path / "x.log")
    descriptor = log.open()
    write(descriptor, written)
    os.close(descriptor)
    assert log.last_line() == line


def test_a_long_log_is_cut_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MAX_LOG_BYTES", 1000)
    log = LogFile(tmp_path / "x.log")
    log.trim()
    descriptor = log.open()
    for number in range(1000):
        write(descriptor, f"line {number:04}\n")
        log.trim()
    write(descriptor, "the end\n")
    os.close(descriptor)
    assert log.path.stat().st_size <= 1100
    assert (tmp_path / "x.log.1").stat().st_size <= 1100
    assert log.path.read_bytes()[:1] != b"\0"
    assert log.last_line() == "the end"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1"]


def test_a_full_disk_costs_old_lines_and_not_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MAX_LOG_BYTES", 1000)
    log = LogFile(tmp_path / "x.log")
    descriptor = log.open()
    write(descriptor, "x" * 2000)

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    log.trim()
    os.close(descriptor)
    assert log.path.stat().st_size == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.log"], "a piece of it would hold the room that is needed"
