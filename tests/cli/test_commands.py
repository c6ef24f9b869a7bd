"""The small commands, and what they have in common."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headrace_cli import doctor_command
from headrace_cli.commands import COMMANDS, run
from headrace_cli.doctor_command import examine
from headrace_cli.errors import CommandError
from headrace_cli.preflight import check_data_dir, leaving_none
from headrace_cli.settings import DoctorSettings
from headrace_cli.state_file import (
    InstanceState,
    ProcessState,
    birth_of,
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
    err = capsys.readouterr().err
    assert err.startswith(f"headrace {command}: --xyzzy: unknown flag; see --help") and err.count("\n") == 1


def test_a_service_s_own_flag_is_answered_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--max-wait-s", "20"]) == 2
    assert "--max-wait-s: unknown flag; see --help" in (err := capsys.readouterr().err)
    assert "HEADRACE_MAX_WAIT_S" in err


def test_a_name_behind_the_flags_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "--file", "x", "chatcmpl-1"]) == 2
    assert capsys.readouterr().err == (
        "headrace explain: chatcmpl-1: unexpected argument; REQUEST comes before the flags\n"
    )


def test_several_instances_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert run(["keys", "list"]) == 1
    assert "no instance runs; name a broker" in capsys.readouterr().err
    for name in ("8000", "9000"):
        (tmp_path / "headrace" / name).mkdir(parents=True)
        write_state(tmp_path / "headrace" / name, example_state(processes=()))
    assert run(["keys", "list"]) == 1
    base = tmp_path / "headrace"
    assert f"several instances run ({base}/8000, {base}/9000); name " in capsys.readouterr().err
    assert run(["keys", "list", "--data-dir", str(tmp_path)]) == 1
    assert f"no instance runs in {tmp_path}; name " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("explain", ("explain REQUEST [", "x-request-id", "chatcmpl-")),
        ("trace", ("trace REQUEST [", "x-request-id", "chatcmpl-")),
        ("record", ("record FILE [",)),
        ("replay", ("replay FILE [", "headrace record")),
        ("keys", ("keys create|list|revoke KEY… [", "headrace keys create --help")),
        ("dead", ("dead list|show ID…|requeue ID…|drop ID… [",)),
        ("drain", ("drain WORKER [", "headrace ps")),
        ("park", ("park WORKER [", "headrace ps")),
        ("promote", ("promote WORKER [", "headrace ps")),
        ("flood", ("flood compare A.json B.json", "offered", "throughput", "goodput")),
    ],
)
def test_help_names_what_stands_beside_the_flags(
    command: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run([command, "--help"])
    text = "".join(capsys.readouterr().out.split())  # lines are broken anywhere, at hyphens too
    assert all("".join(word.split()) in text for word in words), text


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("version", *BECOME_ANOTHER)])
def test_help_says_what_the_command_does(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([command, "--help"])
    _, _, rest = capsys.readouterr().out.partition("\n\n")
    assert rest[0].isupper() and not rest.startswith("options:"), "a sentence follows the usage"


@pytest.mark.parametrize("command", BECOME_ANOTHER)
def test_commands_that_become_another_program_have_help(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace_cli", command, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "headrace_cli", "help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in (0, 1)


def test_nothing_need_be_open() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m headrace_cli help <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, timeout=60).returncode == 0


def test_a_user_without_a_home_is_told_what_to_give(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert run(["ps"]) == 2
    assert capsys.readouterr().err.startswith("headrace ps: data_dir: must be given: this user has no home folder")


def example_state(**changes: object) -> InstanceState:
    worker = ProcessState(service="worker", id="worker-1", pid=os.getpid(), state="ready", model="tiny")
    router = ProcessState(service="router", id="router-1", pid=0, state="restarting", port=8000, num_restarts=2)
    values: dict[str, object] = {
        "pid": os.getpid(),
        "birth": birth_of(os.getpid()),
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


def test_ps_shows_instances_in_folders_of_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    write_state(folder, example_state(processes=()))
    assert run(["ps", "--json", "--data-dir", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["data_dir"] == f"{tmp_path}/\ufffd"


def test_ps_finds_all_instances_in_the_default_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert run(["ps"]) == 0
    assert f"No instance is running in {tmp_path}/headrace. " in capsys.readouterr().out
    for port in ("8000", "9000"):
        folder = tmp_path / "headrace" / port
        folder.mkdir(parents=True)
        write_state(folder, example_state(processes=()))
    assert run(["ps", "--json"]) == 0
    assert [Path(each["data_dir"]).name for each in json.loads(capsys.readouterr().out)] == ["8000", "9000"]
    assert run(["ps"]) == 0
    first, second = (line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:])
    assert (first, second) == (f"{tmp_path}/headrace/8000", f"{tmp_path}/headrace/9000")


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"birth": "another"}])
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


def test_doctor_leaves_nothing_behind(tmp_path: Path) -> None:
    settings = DoctorSettings(port=free_port(), data_dir=str(tmp_path / "share" / "headrace" / "8000"))
    (data,) = [finding for finding in examine(settings, {}) if finding.subject == "data"]
    assert data.text.endswith("8000 is writable") and list(tmp_path.iterdir()) == []
    used = tmp_path / "share"
    used.mkdir()
    with leaving_none(used / "headrace"):
        check_data_dir(used / "headrace" / "8000")
    assert list(used.rglob("*")) == [used / "headrace", used / "headrace" / "8000"], "somebody uses it by now"


HEALTHY = {"/health": {"status": "ready", "workers": 2}, "/version": {"version": "1.2.3"}}


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (HEALTHY, "Headrace 1.2.3 runs there, ready; another one needs another --port"),
        ({"/health": HEALTHY["/health"]}, "Headrace runs there, ready; another one needs another --port"),
        (
            {"/health": {"status": "not_ready", "reason": "no worker is ready", "workers": 0}},
            "Headrace runs there, no worker is ready; another one needs another --port",
        ),
        ({"/health": {"status": "ok"}, "/version": {"version": "9"}}, None),
        ({}, None),
    ],
    ids=["running", "keys wanted", "not ready", "another server", "no such paths"],
)
def test_doctor_knows_a_headrace_from_another_server(
    tmp_path: Path, answers: dict[str, dict[str, object]], told: str | None
) -> None:
    with answering(answers) as port:
        findings = examine(DoctorSettings(port=port, data_dir=str(tmp_path)), {})
    (found,) = [finding for finding in findings if finding.subject == f"port {port}"]
    assert found.is_problem == (told is None)
    assert found.text == (told or f"port {port} is taken; choose another with --port")


@contextlib.contextmanager
def answering(answers: dict[str, dict[str, object]]) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = json.dumps(answers.get(self.path, {})).encode()
            self.send_response(200 if self.path in answers else 401)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


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


def test_ctrl_c_during_an_import_is_neither_told_in_pages_nor_lost(tmp_path: Path) -> None:
    """Python drops what is raised where an object goes, as the locks of imports do."""
    (tmp_path / "httpx.py").write_text(
        "import os, signal\n"
        "class Lock:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "Lock()\n"
        "raise SystemExit('Ctrl-C was lost')\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))}
    command = [sys.executable, "-P", "-m", "headrace_cli", "up"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_broker_that_is_not_there_is_one_line() -> None:
    """What connections say of their attempts is for services' logs."""
    command = [sys.executable, "-P", "-m", "headrace_cli", "keys", "list", "--json", "--nats-url", "nats://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("headrace keys: the broker does not answer: no broker at nats://127.0.0.1:1")


def test_a_state_that_cannot_be_removed_does_not_spoil_the_end(tmp_path: Path) -> None:
    remove_state(tmp_path)
    (tmp_path / "state.json").mkdir()
    remove_state(tmp_path)
    assert read_state(tmp_path) is None
