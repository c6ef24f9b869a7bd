"""What the iteration loop asks of an engine. No torch here: the loop runs as well on a scripted engine.

The loop decides *what* an iteration computes; the engine computes it and samples. The engine knows sequences only as
far as sampling needs them (parameters, token counts, noise) and blocks only as rows of its cache.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import Admission, BlockId, FinishReason, SequenceId, TokenLogprobs

MAX_TARGETS = 64
"""Of all slices of an iteration: so many more rows of logits are in memory then."""
MAX_EMBEDDED = 24
"""Sequences of an iteration that want an embedding, whatever part of their prompt it computes: it tells all of them in
one frame, also with the largest hidden size (`models.config.MOST`)."""

Report = Callable[[str, int, int], None]
"""Progress of loading: (what is being done, steps done, steps in all)."""


class SequenceSlice(NamedTuple):
    """One sequence's part in one iteration: positions [start, start + num_tokens)."""

    sequence_id: SequenceId
    start: int
    num_tokens: int
    token_ids: Sequence[int] | None
    """The tokens at those positions. None: the single one that the iteration in flight is sampling for it."""
    block_ids: Sequence[BlockId]
    """The block table; covers every position up to the last one computed here."""
    samples: bool
    """The slice reaches the last known token, so the next one is sampled."""
    num_drafts: int = 0
    """The last so many of `token_ids` are guesses: what follows the last known token, and then each of them, is
    sampled."""
    targets: Sequence[int] = ()
    """What follows each of the first positions, whose log-probabilities are wanted."""

    @property
    def num_rows(self) -> int:
        """Positions whose logits are wanted: first those of the targets, then those that are sampled."""
        return len(self.targets) + (1 + self.num_drafts if self.samples else 0)


class SampledToken(NamedTuple):
    sequence_id: SequenceId
    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """This sequence alone failed (NaN logits, say); `token` means nothing then."""
    embedding: bytes | None = None
    """Where it was asked for: see `pooling.py`."""


class SequenceResult(Struct, frozen=True, array_like=True):
    """What one iteration did to one sequence."""

    sequence_id: SequenceId
    num_computed: int
    token: int | None = None
    finish: FinishReason | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None
    scores: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's next tokens."""
    embedding: bytes | None = None


class AdapterSet(Protocol):
    """The LoRA adapters that an engine holds, by digest."""

    def __contains__(self, digest: object) -> bool:
        """Sequences with it may be added."""
        ...

    def read(self, folder: str) -> Any:
        """What `add` takes, from an adapter's files, with a member `digest`. In any thread, one at a time. Raises
        AdapterRefused."""
        ...

    def add(self, adapter: Any) -> None:
        """Raises AdapterRefused where there is no room for it. No-op if it is there."""
        ...

    def drop(self, digest: str) -> None:
        """No further sequence gets it; its memory comes back when those that have it are gone. Unknown: no-op."""
        ...


class EngineFacts(NamedTuple):
    """Measured or configured when the engine was loaded; never changes afterwards."""

    card: ModelCard
    num_blocks: int
    block_size: int
    context: int
    """min(model's context, configured bound, num_blocks * block_size)."""
    max_sequences: int
    tokens_per_iteration: int
    device: str
    dtype: str
    num_stages: int = 1
    """Stages of a pipeline: so many iterations may be in flight, each of them decoding other sequences."""
    max_drafts: int = 0
    """Most draft tokens in a slice."""


class Engine(Protocol):
    """Not thread-safe. Any exception but those reported per sequence means that the engine is beyond repair."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def looks_ahead(self) -> bool:
        """Iteration i + 1 may be submitted before iteration i is collected (the device works asynchronously), with
        slices whose token iteration i is still sampling. The loop makes no use of it in a pipeline."""
        ...

    @property
    def adapters(self) -> AdapterSet | None:
        """None: it serves none."""
        ...

    def add(self, admission: Admission) -> None:
        """Registers a sequence: its sampling parameters, and its prompt and output for penalties. Copies
        `admission.copies` before anything that is submitted later runs. The caller knows that its adapter is there."""
        ...

    def is_ready(self, sequence_id: SequenceId, *, wait: bool) -> bool:
        """Whether a sequence may be submitted: its grammar, if any, is compiled. `wait` some milliseconds for it."""
        ...

    def remove(self, sequence_id: SequenceId) -> None:
        """Forgets a sequence. Safe while an iteration that contains it is in flight."""
        ...

    def rest(self) -> None:
        """It has no sequence, and none is expected soon: gives the cache's memory back as far as it can. What is added
        later finds everything as in the beginning."""
        ...

    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        """Starts one iteration over at least one slice. As many may be outstanding as the facts' `num_stages`; without
        stages two, or one if not `looks_ahead`."""
        ...

    def collect(self) -> list[SampledToken]:
        """Waits for the oldest outstanding iteration: for each slice, in slice order, an item for each target (with its
        log-probabilities), then, if it samples, one item and one more for each draft. Items behind the first draft that
        was not sampled mean nothing."""
        ...
