"""The log of one child process: appended by the child, kept small by us."""

import os
import re
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

MAX_LOG_BYTES = 16 * 1024 * 1024
"""The older half moves to `<name>.1`, which is replaced each time."""
_TAIL_BYTES = 16 * 1024
log = structlog.get_logger(__name__)

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


class LogFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def open(self) -> int:
        """A descriptor for the child, in append mode: so it goes on at the end after `trim` has truncated the file.
        Raises OSError."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._start = os.fstat(descriptor).st_size
        return descriptor

    def open_if_possible(self) -> int:
        """The same, or /dev/null: to serve without a log is better than not to serve."""
        try:
            self.path.parent.mkdir(exist_ok=True)
            return self.open()
        except OSError as error:
            log.warning("a process runs without its log", path=str(self.path), error=str(error))
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def trim(self) -> None:
        """Bounds the file. What the child writes meanwhile may be lost; and so is the older half where there is no room
        for it."""
        try:
            if self.path.stat().st_size <= MAX_LOG_BYTES:
                return
            with self.path.open("rb+") as file:
                self._keep(file.read(MAX_LOG_BYTES))
                file.truncate(0)
            self._start = 0
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("log not cut", path=str(self.path), error=str(error))

    def _keep(self, content: bytes) -> None:
        older = self.path.with_name(self.path.name + ".1")
        try:
            older.write_bytes(content)
        except OSError as error:
            log.warning("older lines of a log are lost", path=str(self.path), error=str(error))
            older.unlink(missing_ok=True)

    def last_line(self) -> str:
        """The last thing that the current child has said, as one line without control characters; empty if none."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - _TAIL_BYTES, min(self._start, size)))
                text = file.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""
        lines = [clean for line in text.splitlines() if (clean := _ESCAPES.sub("", line).strip())]
        return _plain(lines[-1])[:1000] if lines else ""


class _Exception(Struct):
    exc_type: str = ""
    exc_value: str = ""


class _Event(Struct):
    """What of a line of JSON is for people."""

    event: str
    reason: str = ""
    exception: list[_Exception] = []


def _plain(line: str) -> str:
    try:
        event = msgspec.json.decode(line, type=_Event)
    except msgspec.DecodeError:
        return line
    details = [event.reason, *(f"{each.exc_type}: {each.exc_value}" for each in event.exception[:1])]
    return ": ".join(filter(None, (event.event, *details)))
