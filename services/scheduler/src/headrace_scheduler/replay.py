"""Runs a flight recording through the pure core again.

    python -m headrace_scheduler.replay FILE

A file is a row of stored messages, each behind its length (4 bytes, big-endian); `headrace record` writes it.
"""

import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace_scheduler.decisions import Decisions
from headrace_scheduler.events import argument_types, event_names, time_argument
from headrace_scheduler.recording import PASS, STATE, Chunk, digest, load_state
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.codec import decode
from headrace_shared.errors import ProtocolError
from headrace_shared.record_messages import FlightPart

LENGTH = struct.Struct(">I")
EVENTS = event_names(Scheduler)
MAX_SHOWN = 10


class Moment(NamedTuple):
    """One event of a recording, just after it has happened to `core` again."""

    scheduler: str
    wall: float
    """Seconds since the epoch."""
    core: Scheduler
    name: str
    arguments: tuple[Any, ...]
    decisions: Decisions | None
    """Of a pass."""
    is_same: bool
    """Of a pass: it decided what it decided then."""


class Report(NamedTuple):
    num_events: int
    num_passes: int
    num_grants: int
    """Credits of one worker."""
    num_different: int
    """Passes that decided something else."""


def read_file(path: Path) -> Iterator[bytes]:
    """The messages of a file. Raises ProtocolError, OSError."""
    return split(path.read_bytes(), str(path))


def split(data: bytes, name: str) -> Iterator[bytes]:
    """The messages of what stands in a file. Raises ProtocolError."""
    position = 0
    while position < len(data):
        if position + LENGTH.size > len(data):
            raise ProtocolError(f"{name} ends within a length")
        (size,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size
        if position + size > len(data):
            raise ProtocolError(f"{name} ends within a message")
        yield data[position : position + size]
        position += size


def chunks(messages: Iterable[bytes]) -> Iterator[Chunk]:
    """Whole chunks, each as soon as its last part has come. Raises ProtocolError."""
    decoder = msgspec.msgpack.Decoder(Chunk)
    parts: dict[str, list[FlightPart]] = {}
    for message in messages:
        part = decode(message, FlightPart)
        collected = parts.setdefault(part.scheduler, [])
        if part.part != len(collected) or (collected and collected[0].chunk != part.chunk):
            collected.clear()
            if part.part:
                continue  # its first parts are missing
        collected.append(part)
        if len(collected) == part.num_parts:
            data = b"".join(each.data for each in collected)
            collected.clear()
            try:
                yield decoder.decode(data)
            except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
                raise ProtocolError(f"undecodable chunk of a recording: {error}") from error


def nothing_of(request_id: str, recorded: Sequence[Chunk]) -> str:
    """What to say to whoever asks for a request that a recording does not know."""
    if not recorded:
        return "the recording is empty"
    begin = datetime.fromtimestamp(min(chunk.begun_at for chunk in recorded), UTC)
    return f"the recording, which begins at {begin:%Y-%m-%d %H:%M:%S}Z, knows no request {request_id}"


Before = Callable[[Scheduler, str, tuple[Any, ...]], None]
"""Called with the core as it is before an event, its name and its arguments."""


def replay(recorded: Iterable[Chunk], before: Before | None = None) -> Iterator[Moment]:
    """Every event from each scheduler's first keyframe on, and after a gap from the next one. Raises ProtocolError if a
    recording is of another version of the program."""
    runs: dict[str, _Run] = {}
    for chunk in recorded:
        run = runs.pop(chunk.scheduler, None)
        if chunk.keyframe:
            if chunk.fingerprint != STATE.fingerprint:
                raise ProtocolError("the recording is of another version of the scheduler")
            run = _Run(load_state(chunk.keyframe), before)
        elif run is None or run.number + 1 != chunk.number:
            continue
        runs[chunk.scheduler] = run
        yield from run.again(chunk)


class _Run:
    """One scheduler's core, as far as it has been replayed."""

    def __init__(self, core: Scheduler, before: Before | None) -> None:
        self.number = 0
        self._core = core
        self._before = before

    def again(self, chunk: Chunk) -> Iterator[Moment]:
        self.number = chunk.number
        wall = chunk.begun_at
        for name, raw in chunk.records:
            arguments, expected = _decode(name, raw)
            position = 0 if name == PASS else time_argument(getattr(Scheduler, name))
            if position is not None:
                wall = chunk.begun_at + arguments[position] - chunk.begun_now
            if self._before is not None:
                self._before(self._core, name, arguments)
            result = getattr(Scheduler, name)(self._core, *arguments)
            decisions = result if name == PASS else None
            is_same = decisions is None or digest(decisions) == expected
            yield Moment(chunk.scheduler, wall, self._core, name, arguments, decisions, is_same)


def _decode(name: str, raw: msgspec.Raw) -> tuple[tuple[Any, ...], bytes]:
    """(arguments, digest of what a pass decided)."""
    try:
        if name == PASS:
            now, expected = msgspec.msgpack.decode(raw, type=tuple[float, bytes])
            return (now,), expected
        if name not in EVENTS:
            raise ProtocolError(f"the recording tells of {name!r}, which this version does not know")
        count = len(msgspec.msgpack.decode(raw, type=list[msgspec.Raw]))
        return msgspec.msgpack.decode(raw, type=argument_types(getattr(Scheduler, name), count)), b""
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"undecodable event {name!r}: {error}") from error


def run(messages: Iterable[bytes], out: Callable[[str], object]) -> Report:
    """Replays all of it; tells of each pass that decides something else than it did. Raises ProtocolError."""
    num_events = num_passes = num_grants = num_different = 0
    for moment in replay(chunks(messages)):
        num_events += 1
        if moment.decisions is None:
            continue
        num_passes += 1
        num_grants += len(moment.decisions.credits)
        if not moment.is_same:
            num_different += 1
            if num_different <= MAX_SHOWN:
                out(f"{moment.scheduler} at {moment.arguments[0]:.6f}: now it decides {moment.decisions}\n")
    return Report(num_events, num_passes, num_grants, num_different)


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        sys.stderr.write("usage: python -m headrace_scheduler.replay FILE\n")
        return 2
    try:
        report = run(read_file(Path(argv[0])), sys.stdout.write)
    except (ProtocolError, OSError) as error:
        sys.stderr.write(f"headrace replay: {error}\n")
        return 2
    sys.stdout.write(
        f"{report.num_events} events, {report.num_passes} passes, {report.num_grants} grants: "
        + (f"{report.num_different} passes differ\n" if report.num_different else "every decision is the same\n")
    )
    if not report.num_events:
        sys.stderr.write("headrace replay: nothing to replay: the recording holds no state to start from\n")
        return 2
    return 1 if report.num_different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
