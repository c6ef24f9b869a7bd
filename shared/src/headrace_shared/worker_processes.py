"""What an autoscaler asks of the command that started it: workers as processes of this machine.

Both ends of a socket that nobody else has; frames are a length (unsigned 32-bit big-endian) and a message. Questions
may overlap: an answer has the number of its question.
"""

import asyncio
import struct

from msgspec import Struct

from headrace_shared.codec import decode, encode
from headrace_shared.errors import ProtocolError
from headrace_shared.messages import WorkerId

MAX_FRAME_BYTES = 1 << 20
_HEAD = struct.Struct(">I")


class WorkerProcess(Struct, frozen=True, kw_only=True):
    worker: WorkerId
    """Its service id, different for each start."""
    model: str
    pid: int
    started_at: float
    """Unix seconds."""
    exit_code: int | None = None
    """None: it runs. Negative: the signal that ended it."""
    is_stopping: bool = False


class ListWorkers(Struct, frozen=True, tag=True, kw_only=True):
    number: int


class StartWorker(Struct, frozen=True, tag=True, kw_only=True):
    """One that is there already is not started again."""

    number: int
    model: str
    worker: WorkerId
    generation: int
    """A lower one than was seen before is refused."""
    is_parked: bool = False


class StopWorker(Struct, frozen=True, tag=True, kw_only=True):
    """Ends it and forgets it; no error if it is not there."""

    number: int
    worker: WorkerId
    grace_s: float


class Workers(Struct, frozen=True, tag=True, kw_only=True):
    """All there are, after what was asked was done."""

    number: int
    workers: tuple[WorkerProcess, ...]


class NotDone(Struct, frozen=True, tag=True, kw_only=True):
    number: int
    reason: str
    is_full: bool = False
    """There is no room for another one."""
    is_fenced: bool = False
    """The generation is too low."""


Question = ListWorkers | StartWorker | StopWorker
Answer = Workers | NotDone


def to_frame(message: Question | Answer) -> bytes:
    data = encode(message)
    return _HEAD.pack(len(data)) + data


async def read_question(reader: asyncio.StreamReader) -> Question | None:
    """None at the end. Raises ProtocolError."""
    data = await _read(reader)
    if data is None:
        return None
    question: Question = decode(data, Question)
    return question


async def read_answer(reader: asyncio.StreamReader) -> Answer | None:
    """None at the end. Raises ProtocolError."""
    data = await _read(reader)
    if data is None:
        return None
    answer: Answer = decode(data, Answer)
    return answer


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if size > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError):
        return None
