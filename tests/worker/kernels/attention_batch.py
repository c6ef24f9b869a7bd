"""Random sequences in a paged cache, for the attention kernels and their reference."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_worker.kernels import attention_reference

FP8 = torch.float8_e4m3fn
LAYOUT_SEED, VALUE_SEED = 1, 2


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16


class Batch(NamedTuple):
    queries: Tensor
    """A view of wider rows, as the model has them."""
    pages: Tensor
    block_table: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    kv_scales: Tensor | None

    def expected(self, *, scale: float, window: int | None = None, softcap: float | None = None) -> Tensor:
        return attention_reference.attend(
            self.queries,
            self.pages,
            self.block_table,
            self.query_starts,
            self.context_lengths,
            scale=scale,
            window=window,
            softcap=softcap,
            kv_scales=self.kv_scales,
        )


def make_batch(
    shape: Shape,
    lengths: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
) -> Batch:
    """lengths: (context length, queries) of each sequence. What no sequence owns is NaN, and tables end in rubbish."""
    generator = torch.Generator().manual_seed(VALUE_SEED)
    counts = [-(-context // shape.block_size) for context, _ in lengths]
    num_blocks = sum(counts) + 2
    free = list(range(num_blocks))
    random.Random(LAYOUT_SEED).shuffle(free)
    sizes = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    pages = torch.randn(sizes, generator=generator)
    table = torch.randint(0, num_blocks, (len(lengths), max(counts) + 3), generator=generator, dtype=torch.int32)
    owned = torch.zeros((num_blocks, shape.block_size), dtype=torch.bool)
    for row, ((context, _), count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        table[row, :count] = blocks
        positions = torch.arange(context)
        owned[blocks[positions // shape.block_size].long(), positions % shape.block_size] = True
    pages = pages.masked_fill(~owned[:, None, None, :, None], torch.nan).to(kv_dtype or dtype)
    num_queries = torch.tensor([0, *(count for _, count in lengths)], dtype=torch.int32)
    num_tokens = int(num_queries.sum())
    wide = torch.randn((num_tokens, shape.num_heads + 2, shape.head_dim), generator=generator).to(dtype)
    scales = None
    if pages.dtype == FP8:
        scales = (0.5 + torch.rand((2, shape.num_kv_heads), generator=generator)).to(device)
    return Batch(
        queries=wide.to(device)[:, : shape.num_heads],
        pages=pages.to(device),
        block_table=table.to(device),
        query_starts=num_queries.cumsum(0, dtype=torch.int32).to(device),
        context_lengths=torch.tensor([context for context, _ in lengths], dtype=torch.int32, device=device),
        kv_scales=scales,
    )
