"""What the leader of a group and its followers say to each other, once or twice an iteration.

The format is the wire's (MessagePack), but packed and unpacked by msgspec directly: between two iterations every
microsecond counts, and the other end is a process of the same group and version.
"""

import msgspec
from msgspec import Struct

from headrace_shared.errors import ProtocolError
from headrace_shared.messages import Admission, BlockId, SequenceId
from headrace_worker.engine_frames import framed
from headrace_worker.iteration import SampledToken


class Join(Struct, frozen=True, tag="j", array_like=True):
    """Follower to leader, first of all."""

    rank: int
    token: str


class Add(Struct, frozen=True, tag="a", array_like=True):
    num_collected: int
    """Iterations that the leader has collected since its last frame: done first."""
    removed: list[SequenceId]
    """Sequences that it has forgotten since its last frame: done next."""
    admission: Admission


class SliceFrame(Struct, frozen=True, array_like=True):
    """`iteration.SequenceSlice` without what the follower has already."""

    sequence_id: SequenceId
    start: int
    num_tokens: int
    is_known: bool
    """The tokens are in the iteration's `token_ids`; else the iteration in flight samples the only one."""
    samples: bool
    num_drafts: int
    new_block_ids: list[BlockId]
    """What the block table has grown by since this sequence's last slice."""
    targets: list[int]


class Iterate(Struct, frozen=True, tag="i", array_like=True):
    num_collected: int
    removed: list[SequenceId]
    slices: list[SliceFrame]
    token_ids: bytes
    """Of all slices whose tokens are known, in order; unsigned 32-bit."""


class Sampled(Struct, frozen=True, tag="s", array_like=True):
    """Sampler to leader: what an iteration sampled."""

    tokens: list[SampledToken]


class Rest(Struct, frozen=True, tag="r", array_like=True):
    num_collected: int
    removed: list[SequenceId]


ToFollower = Add | Iterate | Rest
ToLeader = Join | Sampled

_encoder = msgspec.msgpack.Encoder()
_to_follower = msgspec.msgpack.Decoder(ToFollower)
_to_leader = msgspec.msgpack.Decoder(ToLeader)


def pack(frame: ToFollower | ToLeader) -> bytes:
    """One frame with its header. Raises ProtocolError above MAX_FRAME_BYTES."""
    return framed(_encoder.encode(frame))


def unpack_command(data: bytes) -> ToFollower:
    """Raises ProtocolError."""
    try:
        return _to_follower.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"undecodable command: {error}") from error


def unpack_answer(data: bytes) -> ToLeader:
    """Raises ProtocolError."""
    try:
        return _to_leader.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"undecodable answer: {error}") from error
