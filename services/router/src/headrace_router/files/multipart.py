"""multipart/form-data in pieces, as it comes (RFC 7578, RFC 2046). Pure.

Where the pieces are cut makes no difference. Nothing is kept but what may still be a boundary or a part's head, and
both are bounded; the content of parts is handed on at once.
"""

import re
from enum import Enum
from typing import NamedTuple

from headrace_shared.errors import InvalidRequest

MAX_PARTS = 16
MAX_HEAD_BYTES = 8 * 1024
"""Of one part."""
MAX_HEADERS = 16
MAX_PREAMBLE_BYTES = 1024
"""In front of the first boundary; nobody needs it."""
MAX_NAME_CHARS = 64

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_PARAMETER = re.compile(r';\s*([!#$%&\'*+\-.^_`|~0-9A-Za-z]+)\s*=\s*(?:"((?:[^"\\\r\n]|\\.)*)"|([^\s";]+))\s*')
_HEADER_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,64}")

_PLAIN = (b"binary", b"8bit", b"7bit")


class PartBegin(NamedTuple):
    name: str
    filename: str | None
    """As the client wrote it, not yet harmless; None: a field."""


class PartData(NamedTuple):
    data: bytes
    """Not empty."""


class PartEnd(NamedTuple):
    pass


Event = PartBegin | PartData | PartEnd


class _State(Enum):
    PREAMBLE = "preamble"
    BOUNDARY = "boundary"
    """Behind one: is it the last?"""
    HEAD = "head"
    CONTENT = "content"
    END = "end"


def boundary_of(content_type: str) -> bytes:
    """Raises InvalidRequest unless it is multipart/form-data with a boundary."""
    kind, _, rest = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise InvalidRequest("The content type must be multipart/form-data.", code="unsupported_media_type")
    boundary = _parameters(";" + rest).get("boundary", "")
    if _BOUNDARY.fullmatch(boundary) is None:
        raise _malformed("the content type names no valid boundary")
    return boundary.encode()


class MultipartParser:
    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # As if a line had ended before the first boundary.
        self._buffer = bytearray(b"\r\n")
        self._state = _State.PREAMBLE
        self._num_parts = 0
        self._is_first = False
        """The buffer begins with the end of the head's last line, which is no content."""

    @property
    def is_complete(self) -> bool:
        """The last boundary has come."""
        return self._state is _State.END

    def feed(self, data: bytes) -> list[Event]:
        """Raises InvalidRequest; then the parser is of no use any more."""
        events: list[Event] = []
        if self._state is _State.END:
            return events  # what is behind it is nobody's
        self._buffer += data
        while self._step(events):
            pass
        return events

    def _step(self, events: list[Event]) -> bool:
        """False: more is needed."""
        match self._state:
            case _State.PREAMBLE:
                return self._find_first()
            case _State.BOUNDARY:
                return self._end_boundary()
            case _State.HEAD:
                return self._read_head(events)
            case _State.CONTENT:
                return self._read_content(events)
            case _State.END:
                self._buffer.clear()
                return False

    def _find_first(self) -> bool:
        most = MAX_PREAMBLE_BYTES + len(self._delimiter)
        at = self._buffer.find(self._delimiter, 0, most)
        if at < 0:
            if len(self._buffer) >= most:
                raise _malformed("the boundary does not come")
            return False
        del self._buffer[: at + len(self._delimiter)]
        self._state = _State.BOUNDARY
        return True

    def _end_boundary(self) -> bool:
        if len(self._buffer) < 2:
            return False
        if self._buffer.startswith(b"--"):
            if not self._num_parts:
                raise _malformed("it has no parts")
            self._state = _State.END
            return True
        at = self._buffer.find(b"\r\n", 0, MAX_HEAD_BYTES)
        if at < 0:
            if len(self._buffer) >= MAX_HEAD_BYTES:
                raise _malformed("a boundary does not end")
            return False
        if self._buffer[:at].strip(b" \t"):
            raise _malformed("there is something behind a boundary")
        # The line's end stays: a part without headers begins with an empty line.
        del self._buffer[:at]
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        self._state = _State.HEAD
        return True

    def _read_head(self, events: list[Event]) -> bool:
        at = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES + 4)
        if at < 0:
            if len(self._buffer) >= MAX_HEAD_BYTES + 4:
                raise _malformed(f"the head of a part exceeds {MAX_HEAD_BYTES} bytes")
            return False
        events.append(_begin(bytes(self._buffer[2:at]) if at else b""))
        # Again the line's end stays: content may be empty, and its boundary follow at once.
        del self._buffer[: at + 2]
        self._state = _State.CONTENT
        self._is_first = True
        return True

    def _read_content(self, events: list[Event]) -> bool:
        skip = 2 if self._is_first else 0
        at = self._buffer.find(self._delimiter)
        if at >= 0:
            self._hand_out(events, skip, at)
            del self._buffer[: at + len(self._delimiter)]
            events.append(PartEnd())
            self._state = _State.BOUNDARY
            return True
        # The end may be the beginning of a boundary.
        safe = len(self._buffer) - len(self._delimiter) + 1
        if safe > skip:
            self._hand_out(events, skip, safe)
            del self._buffer[:safe]
            self._is_first = False
        return False

    def _hand_out(self, events: list[Event], start: int, end: int) -> None:
        if end > start:
            events.append(PartData(bytes(self._buffer[start:end])))


def _begin(head: bytes) -> PartBegin:
    disposition: str | None = None
    lines = head.split(b"\r\n")
    if len(lines) > MAX_HEADERS:
        raise _malformed(f"a part has more than {MAX_HEADERS} headers")
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or _HEADER_NAME.fullmatch(name) is None:
            raise _malformed("a part has a malformed header")
        if name.lower() == b"content-disposition":
            if disposition is not None:
                raise _malformed("a part has two dispositions")
            try:
                disposition = value.decode().strip()
            except UnicodeDecodeError:
                raise _malformed("the head of a part is not UTF-8") from None
        elif name.lower() == b"content-transfer-encoding" and value.strip().lower() not in _PLAIN:
            raise _malformed("a part is encoded, which RFC 7578 forbids")
    kind, _, rest = (disposition or "").partition(";")
    if kind.strip().lower() != "form-data":
        raise _malformed("a part is no form-data")
    parameters = _parameters(";" + rest)
    name_of_part = parameters.get("name", "")
    if not 1 <= len(name_of_part) <= MAX_NAME_CHARS:
        raise _malformed(f"a part's name must have 1 to {MAX_NAME_CHARS} characters")
    return PartBegin(name_of_part, parameters.get("filename"))


def _parameters(text: str) -> dict[str, str]:
    """`;name=value` and `;name="value"`, repeated. The first of equal names counts; what is malformed ends it."""
    found: dict[str, str] = {}
    at = 0
    while (match := _PARAMETER.match(text, at)) is not None:
        quoted = match[2]
        # Browsers write a quote as %22; others escape it.
        value = match[3] if quoted is None else re.sub(r'\\(["\\])', r"\1", quoted).replace("%22", '"')
        found.setdefault(match[1].lower(), value)
        at = match.end()
    return found


def _malformed(problem: str) -> InvalidRequest:
    return InvalidRequest(f"The multipart body is malformed: {problem}.", code="invalid_multipart")
