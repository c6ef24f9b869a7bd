"""The paged cache of keys and values. Who may use which block is the scheduler's business."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_shared.messages import BlockId
from headrace_worker.huge_pages import HUGE_PAGE, huge_zeros, release_pages
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.shard import WHOLE, Shard
from headrace_worker.pages_ahead import PagesAhead


class KVCache:
    """`layers[i]` is [rows, block_size * head_dim], row (block * 2 + part) * num_kv_heads + head.

    Part 0 holds keys, part 1 values. One row is one head of one block in one piece: gathering rows gives [heads,
    positions, head_dim] without a transposition. The block after the last one (`null_block`) stays zero; padding points
    there. `pages` is the same memory as [layers, blocks, 2, num_kv_heads, block_size, head_dim].

    Torch's attention multiplies what lies behind a sequence's end in its last block by 0, which leaves NaN as it is. So
    a block is cleared when a sequence begins to fill it: nobody is hit by what an earlier owner left there. The
    compiled kernels never read what nobody has written, and keep values within a block in an order of their own
    (native/csrc/pages.h).
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.null_block = num_blocks
        shape = (num_layers, num_blocks + 1, 2, num_kv_heads, block_size, head_dim)
        self.pages = (
            huge_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        is_large = device.type == "cpu" and self.pages.nbytes >= HUGE_PAGE
        self._ahead = PagesAhead(self.pages) if is_large else None
        flat = self.pages.view(num_layers, -1, block_size * head_dim)
        self.layers: list[Tensor] = list(flat.unbind(0))
        self._slots: list[Tensor] = list(self.pages.view(num_layers, -1, head_dim).unbind(0))

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
    ) -> "KVCache":
        return cls(
            num_layers=len(shard.layers(config)),
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=len(shard.kv_heads(config)),
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
        )

    def release(self) -> None:
        """Gives the memory back to the system where it is main memory; it is zero, and comes back as it is written. A
        GPU's stays: graphs that are recorded there hold its addresses."""
        if self.pages.device.type == "cpu":
            if self._ahead is not None:
                self._ahead.forget()
            release_pages(self.pages)

    def reach(self, block_id: BlockId) -> None:
        """A block is in use: the memory of the next ones is brought in meanwhile, where it comes with its first use."""
        if self._ahead is not None:
            self._ahead.reach(block_id)

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """slots [tokens, 2 * num_kv_heads] (as in `Inputs`), keys_values [tokens, 2 * num_kv_heads, head_dim]."""
        self._slots[layer].index_put_((slots,), keys_values)

    def copy_blocks(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copies whole blocks, (source, destination), in every layer."""
        if copies:
            sources = torch.tensor([source for source, _ in copies], device=self.pages.device)
            destinations = torch.tensor([destination for _, destination in copies], device=self.pages.device)
            self.pages[:, destinations] = self.pages[:, sources]

    def clear_after(self, block_id: BlockId, offset: int) -> None:
        """Zeroes the positions of a block from `offset` on."""
        self.pages[:, block_id, :, :, offset:] = 0

    def clear_blocks(self, block_ids: Tensor) -> None:
        """Zeroes whole blocks."""
        self.pages.index_fill_(1, block_ids, 0)
