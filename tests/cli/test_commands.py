"""The small commands, and what they have in common."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headrace_cli import doctor_command
from headrace_cli.doctor_command import examine
from headrace_cli.errors import CommandError
from headrace_cli.main import COMMANDS, run
from headrace_cli.settings import DoctorSettings
from headrace_cli.state_file import (
    InstanceState,
    ProcessState,
    lock_data_dir,
    read_state,
    remove_state,
    write_state,
)
from tests.cli.instance import free_port


@pytest.mark.parametrize("argument", ["--help", "-h", "help"])
def test_help_lists_the_commands(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([argument]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    assert re.fullmatch(r"headrace (\d+\.\d+\.\d+|of a source tree)\n", capsys.readouterr().out)


def test_nothing_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "usage: headrace" in capsys.readouterr().out


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve"]) == 2
    assert capsys.readouterr().err.startswith("headrace: serve: unknown command; one of up, init, ps, ")


BECOME_ANOTHER = ("simulate", "sim-worker")
"""Commands that turn the process into one of another program: here that would be the test run itself."""


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("version", *BECOME_ANOTHER)])
def test_each_command_has_help_and_names_bad_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run([command, "--help"])
    assert raised.value.code == 0 and f"usage: headrace {command}" in capsys.readouterr().out
    assert run([command, "--xyzzy"]) == 2
    assert capsys.readouterr().err == f"headrace {command}: --xyzzy: unknown flag; see --help\n"


@pytest.mark.parametrize("command", BECOME_ANOTHER)
def test_commands_that_become_another_program_have_help(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace_cli", command, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr


def example_state(**changes: object) -> InstanceState:
    worker = ProcessState(service="worker", id="worker-1", pid=os.getpid(), state="ready", model="tiny")
    router = ProcessState(service="router", id="router-1", pid=0, state="restarting", port=8000, num_restarts=2)
    values: dict[str, object] = {
        "pid": os.getpid(),
        "created": psutil.Process().create_time(),
        "state": "serving",
        "url": "http://127.0.0.1:8000",
        "model": "tiny",
        "processes": (router, worker),
    }
    return InstanceState(**{**values, **changes})  # type: ignore[arg-type]  # fields by name


def test_ps_lists_every_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_state(tmp_path, example_state())
    assert run(["ps", "--json", "--data-dir", str(tmp_path)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["service"] for each in listed][:3] == ["up", "router", "worker"]
    for key in ("service", "id", "pid", "state", "model", "port", "health_port"):
        assert all(key in each for each in listed)
    assert listed[1]["port"] == 8000 and listed[1]["num_restarts"] == 2 and listed[2]["port"] is None
    assert run(["ps", "--data-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["SERVICE", "ID", "PID", "STATE", "MODEL", "PORT", "RESTARTS"]
    assert lines[2].split() == ["router", "router-1", "0", "restarting", "8000", "2"]


def test_ps_finds_all_instances_in_the_default_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert run(["ps"]) == 0
    assert "No instance is running" in capsys.readouterr().out
    for port in ("8000", "9000"):
        folder = tmp_path / "headrace" / port
        folder.mkdir(parents=True)
        write_state(folder, example_state(processes=()))
    assert run(["ps", "--json"]) == 0
    assert [Path(each["data_dir"]).name for each in json.loads(capsys.readouterr().out)] == ["8000", "9000"]


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"created": 1.0}])
def test_a_dead_instance_is_not_listed(tmp_path: Path, changes: dict[str, object]) -> None:
    write_state(tmp_path, example_state(**changes))
    assert read_state(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x"}', b"\xff" * 100])
def test_a_broken_state_file_is_no_instance(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    assert read_state(tmp_path) is None
    remove_state(tmp_path)
    remove_state(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    with lock_data_dir(tmp_path), pytest.raises(CommandError, match=f"in use by headrace up with pid {os.getpid()}"):
        lock_data_dir(tmp_path)
    lock_data_dir(tmp_path).close()


def test_doctor_finds_this_machine_able(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--port", str(free_port()), "--data-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok ") for line in lines)
    for subject in ("python", "router", "worker", "broker: nats-server", "port", "data", "memory", "built-in model"):
        assert any(subject in line for line in lines)


def test_doctor_tells_every_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "find_spec", lambda name: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = DoctorSettings(port=taken.getsockname()[1], data_dir="/proc/nothing")
        problems = {finding.subject for finding in examine(settings, {}) if finding.is_problem}
    assert {
        "router",
        "scheduler",
        "worker",
        "autoscaler",
        f"port {settings.port}",
        "data",
        "built-in model",
    } <= problems
