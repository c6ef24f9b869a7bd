"""The lines of a batch's input: {"custom_id", "method", "url", "body"} each. Pure."""

import codecs
import hashlib
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from headrace_router.batches.record import BatchError

MAX_LINE_BYTES = 2 * 1024 * 1024
MAX_CUSTOM_ID_CHARS = 512
_STEP_BYTES = 64 * 1024


class Line(NamedTuple):
    number: int
    """From 1, blank lines included."""
    custom_id: str
    body: bytes
    """JSON, as it was written."""


class _Line(Struct):
    custom_id: str
    method: str
    url: str
    body: Raw


class _Body(Struct):
    """What must not be in it; everything else is checked when the line runs, like any other call."""

    stream: object = None
    background: object = None
    model: str | UnsetType = UNSET


class BadLine(Exception):
    def __init__(self, error: BatchError) -> None:
        super().__init__(error.message)
        self.error = error


class LineSplitter:
    """Bytes in pieces to lines, wherever the pieces are cut. A line may end with LF or CR LF; the last one need not. A
    byte order mark may stand at the beginning: Windows' programs write one."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._number = 0
        """Of the last line that is complete, blank ones included."""
        self._is_skipping = False
        """The line is too long; its end has not come yet."""

    @property
    def num_lines(self) -> int:
        """Blank ones included."""
        return self._number

    def feed(self, data: bytes) -> list[tuple[int, bytes | None]]:
        """(number, line) of each line that is complete and not blank; None for one that is too long."""
        lines: list[tuple[int, bytes | None]] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._rest += data[start:end]
            self._end_line(lines)
            start = end + 1
        self._rest += data[start:]
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest.clear()
            self._is_skipping = True
        return lines

    def end(self) -> list[tuple[int, bytes | None]]:
        lines: list[tuple[int, bytes | None]] = []
        if self._rest or self._is_skipping:
            self._end_line(lines)
        return lines

    def _end_line(self, lines: list[tuple[int, bytes | None]]) -> None:
        self._number += 1
        line = bytes(self._rest)
        line = (line.removeprefix(codecs.BOM_UTF8) if self._number == 1 else line).strip()
        if self._is_skipping or len(line) > MAX_LINE_BYTES:
            lines.append((self._number, None))
        elif line:
            lines.append((self._number, line))
        self._rest.clear()
        self._is_skipping = False


def parse_line(number: int, line: bytes | None, endpoint: str) -> Line:
    """Raises BadLine."""
    if line is None:
        raise _bad(number, "line_too_long", f"The line exceeds {MAX_LINE_BYTES} bytes.")
    try:
        told = msgspec.json.decode(line, type=_Line)
    except msgspec.ValidationError as error:
        raise _bad(number, "invalid_line", f"The line is no valid request: {_problem(error)}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(number, "invalid_json_line", f"The line is no valid JSON: {_problem(error)}.") from None
    if not 1 <= len(told.custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise _bad(
            number, "invalid_custom_id", f"'custom_id' must have 1 to {MAX_CUSTOM_ID_CHARS} characters.", "custom_id"
        )
    if told.method != "POST":
        raise _bad(number, "invalid_method", "'method' must be POST.", "method")
    if told.url != endpoint:
        raise _bad(number, "mismatched_url", f"'url' must be the batch's endpoint, {endpoint}.", "url")
    body = bytes(told.body)
    try:
        peeked = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, RecursionError):
        raise _bad(number, "invalid_body", "'body' must be an object with a 'model'.", "body") from None
    if peeked.model is UNSET:
        raise _bad(number, "missing_required_parameter", "'body.model' is required.", "body.model")
    for name, value in (("stream", peeked.stream), ("background", peeked.background)):
        if value not in (None, False):
            raise _bad(number, "invalid_body", f"'body.{name}' must not be set in a batch.", f"body.{name}")
    return Line(number, told.custom_id, body)


class LineChecker:
    """Finds all that is wrong with an input. Memory: 16 bytes and Python's share for each line."""

    def __init__(self, endpoint: str, max_lines: int, max_errors: int) -> None:
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_errors = max_errors
        self._seen: set[bytes] = set()
        self._splitter = LineSplitter()
        self.num_lines = 0
        self.errors: list[BatchError] = []

    @property
    def has_seen_enough(self) -> bool:
        return len(self.errors) >= self._max_errors or self._splitter.num_lines > self._max_lines

    def feed(self, data: bytes) -> None:
        """What comes after it has seen enough is passed over: blank lines cost time too, and count for that."""
        for start in range(0, len(data), _STEP_BYTES):
            if self.has_seen_enough:
                return
            self._check(self._splitter.feed(data[start : start + _STEP_BYTES]))

    def end(self) -> None:
        if not self.has_seen_enough:
            self._check(self._splitter.end())
        if not self.errors and not self.num_lines:
            self.errors.append(BatchError(code="empty_file", message="The input file has no lines."))

    def _check(self, lines: list[tuple[int, bytes | None]]) -> None:
        for number, text in lines:
            if len(self.errors) >= self._max_errors:
                return
            if number > self._max_lines:
                break
            self.num_lines += 1
            try:
                line = parse_line(number, text, self._endpoint)
            except BadLine as bad:
                self.errors.append(bad.error)
                continue
            digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
            if digest in self._seen:
                message = "The 'custom_id' is that of an earlier line."
                self.errors.append(
                    BatchError(code="duplicate_custom_id", message=message, line=number, param="custom_id")
                )
            self._seen.add(digest)
        if self._splitter.num_lines > self._max_lines:
            message = f"The input file has more than {self._max_lines} lines, blank ones included."
            self.errors.append(BatchError(code="too_many_lines", message=message, line=self._max_lines + 1))


def _bad(number: int, code: str, message: str, param: str | None = None) -> BadLine:
    return BadLine(BatchError(code=code, message=message, line=number, param=param))


def _problem(error: Exception) -> str:
    """Without what the client wrote, however long."""
    return str(error)[:160].rstrip(".")
