"""What the I/O process and the engine process say to each other: length-prefixed frames of the wire codec.

To the engine: `Load` once, then the bytes of each `Grant` as they came from the broker (a prompt is never encoded
again), `Reset` and `Rest`, `LoadAdapter` and `DropAdapter`. From it: `Loading` while it loads, the tokenizer in parts,
`Loaded` (or `Refused`), then one `Iteration` for each iteration, a `Rested` for each `Rest` and an `AdapterLoaded` for
each `LoadAdapter`. An engine of several ranks has a process and such a connection for each: all are sent `Load`, only
the first one more than that, and each sends `Beat` twice a second and, when it fails, `RankFailed`.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

from msgspec import Struct

from headrace_shared.errors import ProtocolError
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import Grant, SequenceId
from headrace_worker.config import EngineConfig
from headrace_worker.iteration import SequenceResult

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 8 * 1024 * 1024
TOKENIZER_PART_BYTES = 4 * 1024 * 1024
"""tokenizer.json may be larger than a frame."""


class Load(Struct, frozen=True, tag=True, kw_only=True):
    config: EngineConfig


class Reset(Struct, frozen=True, tag=True, kw_only=True):
    """Drop every sequence: somebody else has them by now."""

    generation: int
    """1, 2, 3 …; the iterations that follow carry it, so that what came before is not taken for what comes after."""


class Rest(Struct, frozen=True, tag=True, kw_only=True):
    """Drop every sequence, and give up what memory only sequences need. The next grant ends it."""

    generation: int
    """As in `Reset`."""


class LoadAdapter(Struct, frozen=True, tag=True, kw_only=True):
    """Answered by an `AdapterLoaded`."""

    name: str
    folder: str
    digest: str = ""
    """What the content must have; empty: any."""
    number: int = 0
    """Comes back in the answer."""


class DropAdapter(Struct, frozen=True, tag=True, kw_only=True):
    """No new sequence has it; it goes with the last one that does."""

    digest: str


class AdapterLoaded(Struct, frozen=True, tag=True, kw_only=True):
    name: str
    digest: str
    """Empty if it could not be read."""
    problem: str = ""
    """Why it cannot be served; empty: it is."""
    number: int = 0
    """Of the `LoadAdapter`."""


class Rested(Struct, frozen=True, tag=True, kw_only=True):
    generation: int


class Loading(Struct, frozen=True, tag=True, kw_only=True):
    stage: str
    current: int
    total: int


class TokenizerPart(Struct, frozen=True, tag=True, kw_only=True):
    data: bytes


class Loaded(Struct, frozen=True, tag=True, kw_only=True):
    """The engine has generated a token. Fields as in `iteration.EngineFacts`."""

    card: ModelCard
    """Without the tokenizer, which came before in parts."""
    num_blocks: int
    block_size: int
    context: int
    max_sequences: int
    tokens_per_iteration: int
    device: str
    dtype: str
    num_stages: int
    max_drafts: int


class Refused(Struct, frozen=True, tag=True, kw_only=True):
    """The configuration cannot be served; trying again is of no use."""

    key: str
    """The setting that is at fault."""
    problem: str


class Iteration(Struct, frozen=True, tag=True, kw_only=True):
    generation: int
    """Of the last reset; 0 without one."""
    num_iterations: int
    """Since the start."""
    rows: tuple[SequenceResult, ...] = ()
    released: tuple[SequenceId, ...] = ()
    num_prefill_tokens: int = 0
    elapsed_s: float = 0.0


class Beat(Struct, frozen=True, tag=True, kw_only=True):
    """A rank lives."""

    is_serving: bool
    """It has loaded its part of the model."""
    is_busy: bool
    """With an iteration."""
    num_steps: int
    """Finished since the start: if it is busy and this does not change, it hangs."""
    memory_bytes: int
    """That the process occupies in main memory."""
    device_bytes: int
    """That it has allocated on its GPU; 0 without one."""


class RankFailed(Struct, frozen=True, tag=True, kw_only=True):
    """The last frame of a rank that raised an exception."""

    problem: str
    is_consequence: bool
    """Another rank is lost, which explains it."""


ToEngine = Load | Grant | Reset | Rest | LoadAdapter | DropAdapter
FromEngine = Loading | TokenizerPart | Loaded | Refused | Iteration | Rested | Beat | RankFailed | AdapterLoaded


def framed(data: bytes) -> bytes:
    """With its header. Raises ProtocolError above MAX_FRAME_BYTES."""
    if len(data) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(data)} bytes exceeds {MAX_FRAME_BYTES}")
    return HEADER.pack(len(data)) + data


def read_frames(stream: BinaryIO) -> Iterator[bytes]:
    """The frames of a blocking stream, without headers. Ends when the other end is closed, also within a frame. Raises
    ProtocolError above MAX_FRAME_BYTES."""
    while True:
        header = stream.read(HEADER.size)
        if len(header) < HEADER.size:
            return
        (size,) = HEADER.unpack(header)
        if size > MAX_FRAME_BYTES:
            raise ProtocolError(f"frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
        data = stream.read(size)
        if len(data) < size:
            return
        yield data
