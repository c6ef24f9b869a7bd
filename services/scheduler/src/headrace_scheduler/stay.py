"""The time that one sequence spends on one worker, under one sequence id.

    admit ─────────────── running ───────────┬── stop ── releasing ── confirm
    (blocks referenced)   advance, extend    │           (blocks awaiting)
                                             └─ finished, cancelled, preempted, or dropped by the worker

The worker's ledger takes it from one to the next.
"""

import sys
from typing import TYPE_CHECKING

from headrace_scheduler.prefix_index import BlockHash
from headrace_shared.messages import BlockId, SequenceId

if TYPE_CHECKING:
    from headrace_scheduler.ledger import WorkerLedger
    from headrace_scheduler.sequence import Sequence

NEVER = sys.maxsize


class Stay:
    """From the admission until the worker confirms the release of its blocks."""

    __slots__ = (
        "block_ids",
        "chain",
        "extend_at",
        "index_at",
        "known_at_start",
        "ledger",
        "num_computed",
        "num_indexed",
        "parent",
        "request",
        "sequence",
        "sequence_id",
    )

    def __init__(
        self, ledger: "WorkerLedger", sequence_id: SequenceId, sequence: "Sequence | None", block_ids: list[BlockId]
    ) -> None:
        self.ledger = ledger
        self.sequence_id = sequence_id
        self.sequence = sequence
        """None: its progress is of no interest any more."""
        self.request = None if sequence is None else sequence.request
        """Whose it was from the beginning: an iteration in flight may still be the end of the worker."""
        self.block_ids = block_ids
        self.num_computed = 0
        self.known_at_start = 0
        """Tokens at the admission: those not yet computed are the worker's backlog."""
        self.extend_at = NEVER
        """Number of tokens at which the horizon falls short. NEVER if it has all it needs, or is in `short` already."""
        self.index_at = NEVER
        """Number of computed positions at which the next block is full."""
        self.chain: list[BlockHash] = []
        """Hashes of the first blocks, known from the admission."""
        self.num_indexed = 0
        self.parent: BlockHash | None = None
        """Hash of the last indexed block."""

    @property
    def num_backlog(self) -> int:
        return max(0, self.known_at_start - self.num_computed)
