"""What the engine asks of a model on the device."""

from typing import NamedTuple, Protocol

from torch import Tensor

from headrace_worker.models.operations import RowAdapters


class DeviceBatch(NamedTuple):
    """One iteration: T tokens of S sequences. All tensors are on the device; all numbers were known to the host."""

    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    kv_slots: Tensor
    """int64 [T]: block * block_size + position within the block."""
    sampled_rows: Tensor | None
    """int64 [R]: the rows that logits are wanted of; None: all."""
    query_starts: Tensor
    """int32 [S + 1]"""
    context_lengths: Tensor
    """int32 [S]"""
    block_tables: Tensor
    """int32 [S, blocks of a whole context]; meaningless behind a sequence's last block."""
    num_decodes: int
    """The first sequences, with one token each."""
    longest_chunk: int
    """Tokens of the longest of the others; 0 if there are none."""
    adapters: RowAdapters | None = None
    """Never in what is recorded."""
    hidden_rows: Tensor | None = None
    """int64 [H]: rows whose last hidden states are wanted. None: nobody's."""
    hidden: Tensor | None = None
    """float32 [H, hidden_size], to be filled with them, as the head gets them."""


class DeviceForward(Protocol):
    def __call__(self, batch: DeviceBatch) -> Tensor:
        """Logits [R, vocab_size] of any float type. Writes the new keys and values to the cache. Only queues work on
        the device, and the same work for the same sizes, whatever the tensors contain."""
        ...
