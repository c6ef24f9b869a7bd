"""What the I/O process and the engine process say to each other: length-prefixed frames of the wire codec.

To the engine: `Load` once, then the bytes of each `Grant` as they came from the broker (a prompt is never encoded
again), and `Reset`. From it: `Loading` while it loads, the tokenizer in parts, `Loaded` (or `Refused`), then one
`Iteration` for each iteration.
"""

import struct

from msgspec import Struct

from headrace_shared.messages import Grant, ModelCard, SequenceId
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


ToEngine = Load | Grant | Reset
FromEngine = Loading | TokenizerPart | Loaded | Refused | Iteration
