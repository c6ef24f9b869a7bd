"""Attention over pages with torch alone: gather a group's blocks into one piece, then scaled dot-product attention.

Memory traffic decides here. Groups are kept so small that what one gather wrote is still in the cores' second-level
cache when attention reads it, and all heads that share a key-value head go through it together.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.inputs import Group, Inputs
from headrace_worker.kv_cache import KVCache

GROUP_BYTES = 2 << 20
"""Keys and values gathered at a time: two cores' second-level caches."""


class GatherAttention:
    """An `AttentionBackend`. Holds the buffer that gathers go to, so it serves one iteration at a time."""

    def __init__(
        self, cache: KVCache, *, num_heads: int, context: int, scale: float, windows: Sequence[int | None]
    ) -> None:
        """`scale`: what scores are multiplied by. `windows`: of each of the cache's layers, how many positions a query
        sees, its own included; None: all up to its own."""
        self._num_heads = num_heads
        self._scale = scale
        self._windows = tuple(windows)
        per_position = 2 * cache.num_kv_heads * cache.head_dim
        sample = cache.layers[0]
        self.gathered_positions = max(cache.block_size, GROUP_BYTES // (per_position * sample.element_size()))
        most = max(self.gathered_positions, math.ceil(context / cache.block_size) * cache.block_size)
        self._buffer = torch.empty(most * per_position, dtype=sample.dtype, device=sample.device)

    def prepare(self, inputs: Inputs, cache: KVCache) -> "PreparedGather":
        groups = {window: [_prepared(group, cache, window) for group in inputs.groups] for window in set(self._windows)}
        by_layer = [groups[window] for window in self._windows]
        return PreparedGather(by_layer, cache, self._buffer, self._num_heads, self._scale)


class _PreparedGroup(NamedTuple):
    first_row: int
    num_rows: int
    num_sequences: int
    num_queries: int
    """Of the sequence with the most."""
    num_positions: int
    cache_rows: Tensor
    """[2 * sequences * num_kv_heads * blocks]"""
    mask: Tensor
    """[sequences, 1, queries, positions]: 0 or -inf, added to the scores."""
    padded_rows: Tensor | None
    """[sequences * queries]: batch row of each padded query, relative to `first_row`. None: nothing is padded."""
    unpadded_rows: Tensor | None
    """[rows]: the inverse."""


def _prepared(group: Group, cache: KVCache, window: int | None) -> _PreparedGroup:
    device = cache.layers[0].device
    num_queries = np.asarray(group.num_queries)
    first_positions = group.last_positions - num_queries + 1
    table, first_blocks = _seen_blocks(group, first_positions, cache, window)
    num_sequences, num_blocks = table.shape
    heads = np.arange(cache.num_kv_heads)[None, None, :, None]
    parts = np.arange(2)[:, None, None, None]
    rows = (table[None, :, None, :] * 2 + parts) * cache.num_kv_heads + heads
    most, num_positions = int(num_queries.max()), num_blocks * cache.block_size
    # Padded queries come last and repeat the last real one.
    offsets = np.minimum(np.arange(most)[None, :], num_queries[:, None] - 1)
    query_positions = (first_positions[:, None] + offsets)[:, :, None]
    positions = (first_blocks * cache.block_size)[:, None, None] + np.arange(num_positions)[None, None, :]
    seen = positions <= query_positions
    if window is not None:
        seen &= positions > query_positions - window
    visible = torch.from_numpy(seen).to(device)
    mask = torch.zeros(visible.shape, dtype=cache.layers[0].dtype, device=device).masked_fill_(~visible, -math.inf)
    padded_rows = unpadded_rows = None
    if num_sequences > 1 and most > 1:
        starts = np.cumsum(num_queries) - num_queries
        padded_rows = torch.from_numpy((starts[:, None] + offsets).reshape(-1)).to(device)
        real = np.arange(most)[None, :] < num_queries[:, None]
        unpadded_rows = torch.from_numpy(np.flatnonzero(real)).to(device)
    return _PreparedGroup(
        first_row=group.first_row,
        num_rows=int(num_queries.sum()),
        num_sequences=num_sequences,
        num_queries=most,
        num_positions=num_positions,
        cache_rows=torch.from_numpy(rows.astype(np.int32).reshape(-1)).to(device),
        mask=mask.unsqueeze(1),
        padded_rows=padded_rows,
        unpadded_rows=unpadded_rows,
    )


def _seen_blocks(
    group: Group, first_positions: NDArray[np.int64], cache: KVCache, window: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The blocks that some query of the sequence sees, [sequences, blocks], padded with the null block, and the number
    of each sequence's first one. What lies before a window is not even gathered."""
    table = group.block_table
    first_blocks = np.zeros(len(table), dtype=np.int64)
    if window is not None:
        first_blocks = np.maximum(first_positions - window + 1, 0) // cache.block_size
    width = int((group.last_positions // cache.block_size - first_blocks).max()) + 1
    if width >= table.shape[1]:
        return table, np.zeros_like(first_blocks)
    columns = first_blocks[:, None] + np.arange(width)[None, :]
    seen = np.take_along_axis(table, np.minimum(columns, table.shape[1] - 1), axis=1)
    return np.where(columns < table.shape[1], seen, cache.null_block), first_blocks


class PreparedGather:
    def __init__(
        self, by_layer: list[list[_PreparedGroup]], cache: KVCache, buffer: Tensor, num_heads: int, scale: float
    ) -> None:
        self._by_layer = by_layer
        self._scale = scale
        self._cache = cache
        self._buffer = buffer
        self._num_heads = num_heads

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        output = queries.new_empty((queries.shape[0], self._num_heads, self._cache.head_dim))
        for group in self._by_layer[layer]:
            rows = slice(group.first_row, group.first_row + group.num_rows)
            keys, values = self._gathered(layer, group)
            if group.num_queries == 1:
                _attend_single(group, queries[rows], keys, values, output[rows], self._scale)
            else:
                _attend_chunks(group, queries[rows], keys, values, output[rows], self._scale)
        return output.flatten(1)

    def _gathered(self, layer: int, group: _PreparedGroup) -> tuple[Tensor, Tensor]:
        """Keys and values, each [sequences, num_kv_heads, positions, head_dim]."""
        pages = self._cache.layers[layer]
        width = pages.shape[1]
        num_rows = group.cache_rows.shape[0]
        gathered = self._buffer[: num_rows * width].view(num_rows, width)
        torch.index_select(pages, 0, group.cache_rows, out=gathered)
        shape = (2, group.num_sequences, self._cache.num_kv_heads, group.num_positions, self._cache.head_dim)
        keys, values = gathered.view(shape).unbind(0)
        return keys, values


def _attend_single(
    group: _PreparedGroup, queries: Tensor, keys: Tensor, values: Tensor, output: Tensor, scale: float
) -> None:
    """One query a sequence: the heads that share a key-value head take the place of queries."""
    shape = (group.num_sequences, keys.shape[1], -1, keys.shape[3])
    mixed = F.scaled_dot_product_attention(queries.view(shape), keys, values, attn_mask=group.mask, scale=scale)
    output.view(shape).copy_(mixed)


def _attend_chunks(
    group: _PreparedGroup, queries: Tensor, keys: Tensor, values: Tensor, output: Tensor, scale: float
) -> None:
    padded = queries if group.padded_rows is None else queries.index_select(0, group.padded_rows)
    by_head = padded.view(group.num_sequences, group.num_queries, *queries.shape[1:]).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(by_head, keys, values, attn_mask=group.mask, enable_gqa=True, scale=scale)
    flat = mixed.transpose(1, 2).reshape(-1, *queries.shape[1:])
    if group.unpadded_rows is None:
        output.copy_(flat)
    else:
        torch.index_select(flat, 0, group.unpadded_rows, out=output)
