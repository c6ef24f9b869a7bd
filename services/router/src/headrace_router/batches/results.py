"""What has come of a batch's lines, as it is kept and as clients get it. Pure.

A result is packed and, where it does not fit a message, cut into parts. Results of one line may be there twice, when
two routers took turns: the first complete one counts, so that whoever reads the same stream finds the same.
"""

import hashlib
import zlib
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from headrace_shared.errors import ProtocolError

MAX_RESULT_BYTES = 64 * 1024 * 1024
"""Unpacked."""
PART_BYTES = 512 * 1024
MAX_PARTS = MAX_RESULT_BYTES // PART_BYTES


class LineResult(Struct, frozen=True, kw_only=True):
    number: int
    custom_id: str
    status: int
    """HTTP; 0: there is no response."""
    request_id: str = ""
    body: bytes = b""
    """JSON."""
    error_code: str = ""
    error_message: str = ""
    """Where there is no response."""

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300


class ResultPart(Struct, frozen=True, tag=True, kw_only=True):
    """A message of the stream."""

    number: int
    writer: str
    """Tells parts of different results for one line apart."""
    part: int
    num_parts: int
    data: bytes
    is_good: bool
    """As the result."""


class _Response(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class _Error(Struct, frozen=True):
    code: str
    message: str


class _OutputLine(Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


_packer = msgspec.msgpack.Encoder()
_unpacker = msgspec.msgpack.Decoder(LineResult)
_json = msgspec.json.Encoder()


def pack(result: LineResult, writer: str) -> list[ResultPart]:
    """`writer` is different for each attempt to store a result. Raises ProtocolError for one that is too large."""
    packed = zlib.compress(_packer.encode(result), 1)
    cut = [packed[start : start + PART_BYTES] for start in range(0, len(packed), PART_BYTES)]
    if len(result.body) > MAX_RESULT_BYTES // 2 or len(cut) > MAX_PARTS:
        raise ProtocolError(f"a result of {len(result.body)} bytes")
    number, num_parts, is_good = result.number, len(cut), result.is_good
    return [
        ResultPart(number=number, writer=writer, part=part, num_parts=num_parts, data=data, is_good=is_good)
        for part, data in enumerate(cut)
    ]


def unpack(parts: list[bytes]) -> LineResult:
    """Raises ProtocolError."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(b"".join(parts), MAX_RESULT_BYTES)
        if not unpacker.eof:
            raise ProtocolError("a result that is too large, or cut off")
        return _unpacker.decode(data)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ProtocolError(f"no result of a line: {error}") from error


class Gathered(NamedTuple):
    number: int
    is_good: bool
    parts: list[bytes]


class ResultGatherer:
    """Parts in the stream's order to results, each line's first one only. Keeps the parts of those that are incomplete,
    and one number for each line that is done."""

    MAX_OPEN = 256
    """Incomplete results at once; the oldest are forgotten, as their writers are long dead."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self._open: dict[tuple[int, str], dict[int, bytes]] = {}

    def feed(self, part: ResultPart) -> Gathered | None:
        if part.number in self.done or not 0 <= part.part < part.num_parts <= MAX_PARTS:
            return None
        key = (part.number, part.writer)
        parts = self._open.setdefault(key, {})
        parts[part.part] = part.data
        if len(parts) < part.num_parts:
            while len(self._open) > self.MAX_OPEN:
                del self._open[next(iter(self._open))]
            return None
        self.done.add(part.number)
        for other in [other for other in self._open if other[0] == part.number]:
            del self._open[other]
        return Gathered(part.number, part.is_good, [data for _, data in sorted(parts.items())])


def output_line(batch_id: str, result: LineResult) -> bytes:
    """One line of an output or error file."""
    response = error = None
    if result.status:
        response = _Response(result.status, result.request_id, Raw(result.body or b"null"))
    else:
        error = _Error(result.error_code, result.error_message)
    return _json.encode(_OutputLine(line_id(batch_id, result.number), result.custom_id, response, error)) + b"\n"


def line_id(batch_id: str, number: int) -> str:
    return "batch_req_" + hashlib.sha256(f"{batch_id}/{number}".encode()).hexdigest()[:24]


def unfinished(number: int, custom_id: str, *, was_cancelled: bool) -> LineResult:
    """Of a line that was not run to its end."""
    if was_cancelled:
        code, message = "batch_cancelled", "This request was not executed because the batch was cancelled."
    else:
        code, message = "batch_expired", "This request could not be executed before the completion window expired."
    return LineResult(number=number, custom_id=custom_id, status=0, error_code=code, error_message=message)
