"""What runs in an instance, for `headrace ps`: one JSON file in its data folder, and a lock that one instance holds."""

import contextlib
import fcntl
import os
import sys
from pathlib import Path
from typing import IO

import msgspec
import psutil
from msgspec import Struct

from headrace_cli.errors import CommandError

STATE_FILE = "state.json"
LOCK_FILE = "lock"
MAX_STATE_BYTES = 1024 * 1024


class ProcessState(Struct, frozen=True, kw_only=True):
    service: str
    id: str
    pid: int
    state: str
    model: str = ""
    port: int | None = None
    health_port: int | None = None
    num_restarts: int = 0
    log: str = ""
    birth: str = ""
    """As of `InstanceState`; empty: not known."""


class InstanceState(Struct, frozen=True, kw_only=True):
    pid: int
    """Of `headrace up`."""
    birth: str
    """`birth_of` that process: a pid alone may come back."""
    state: str
    url: str
    model: str
    processes: tuple[ProcessState, ...] = ()


def readable(path: Path) -> str:
    """For people: names of files are bytes, and need not be UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def write_state(data_dir: Path, state: InstanceState) -> None:
    """Replaces the file in one step. Raises OSError."""
    path = data_dir / STATE_FILE
    scratch = path.with_suffix(".new")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    scratch.replace(path)


def read_state(data_dir: Path) -> InstanceState | None:
    """The state of a running instance; None if none runs here."""
    state = stored_state(data_dir)
    return state if state is not None and is_running(state.pid, state.birth) else None


def stored_state(data_dir: Path) -> InstanceState | None:
    """As the last instance here has left it, whether it runs or not."""
    try:
        with (data_dir / STATE_FILE).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_STATE_BYTES), type=InstanceState)
    except (OSError, msgspec.DecodeError):
        return None


def remove_state(data_dir: Path) -> None:
    """As far as it can be, as on a disk that was made read-only meanwhile: what stays tells of nobody who runs."""
    with contextlib.suppress(OSError):
        (data_dir / STATE_FILE).unlink()


def is_running(pid: int, birth: str) -> bool:
    """What has ended runs no more, also where nobody has waited for it."""
    return birth != "" and birth_of(pid) == birth


def birth_of(pid: int) -> str:
    """What tells a living process from all others that ever had its pid; empty if there is none.

    When it was started, by no clock that anybody can set: where the kernel only tells ticks since the boot, as a date
    they would be another one after each correction of the clock.
    """
    if sys.platform == "linux":
        return _birth_in_ticks(pid)
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if pid > 0 and process.status() != psutil.STATUS_ZOMBIE:
            return f"{process.create_time():.3f}"
    return ""


def _birth_in_ticks(pid: int) -> str:
    boot = ""
    with contextlib.suppress(OSError):  # some sandboxes have none
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        # Behind the program's name, which may hold anything: state, 18 other fields, ticks.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else f"{boot}/{fields[19].decode()}"


def lock_data_dir(data_dir: Path) -> IO[str]:
    """Keeps other instances out until the file is closed or the process dies. Raises CommandError."""
    try:
        file = (data_dir / LOCK_FILE).open("a+")
    except OSError as error:
        raise CommandError(f"cannot write to {data_dir}: {error.strerror}", "choose another --data-dir") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read(32).strip()
        file.close()
        who = f"headrace up with pid {owner}" if owner else "another headrace up"
        raise CommandError(f"{data_dir} is in use by {who}", "stop that one or choose another --data-dir") from error
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    with contextlib.suppress(OSError):  # it is only told
        file.flush()
    return file
