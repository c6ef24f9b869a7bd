"""Slices of an iteration to tensors. Numpy only: no Python work per token."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.iteration import SequenceSlice

LONG_CHUNK = 32
"""A chunk of this many queries keeps the cores busy alone; shorter ones are padded and grouped."""
MOST_PADDING = 512
"""Cached positions that padding may add to a group before a further group is cheaper."""


class Group(NamedTuple):
    """Sequences that attention handles in one piece, in `rows` of the flat batch."""

    first_row: int
    num_queries: Sequence[int]
    """Per sequence."""
    block_table: NDArray[np.int64]
    """[sequences, blocks], padded with the null block."""
    last_positions: NDArray[np.int64]
    """[sequences]: of each one's last query."""


class Ragged(NamedTuple):
    """Sequences as attention sees them if nothing is padded, in the order of their rows."""

    query_starts: NDArray[np.int32]
    """[sequences + 1]: each one's first row, then the number of rows."""
    context_lengths: NDArray[np.int32]
    """[sequences]: positions up to and with the last query."""
    block_table: NDArray[np.int32]
    """[sequences, blocks], padded with the null block."""


class Inputs(NamedTuple):
    token_ids: Tensor
    """[tokens]"""
    positions: Tensor
    """[tokens]"""
    slots: Tensor
    """[tokens, 2 * num_kv_heads]: rows of head_dim in a cache layer."""
    sampled_rows: Tensor
    """[rows that logits are wanted of], in slice order: where a slice's targets follow, then where its last known token
    is, and then its drafts."""
    fresh_blocks: Tensor
    """Blocks that this iteration begins to fill but does not complete."""
    groups: list[Group]
    ragged: Ragged
    row_slots: NDArray[np.int32] | None = None
    """[tokens]: where the row's adapter is, or NO_ADAPTER. None: no row has one."""
    hidden_rows: Tensor | None = None
    """[rows], in slice order: those whose last hidden states are wanted. None: nobody's."""


def build_inputs(
    slices: Sequence[SequenceSlice],
    *,
    block_size: int,
    num_kv_heads: int,
    null_block: int,
    gathered_positions: int,
    device: torch.device,
    adapters: Sequence[int] | None = None,
    pooled: Sequence[bool] | None = None,
) -> Inputs:
    """`gathered_positions`: how many cached positions (padding included) a group may gather, one sequence aside. 0: no
    groups are made. `adapters`: slot of each slice's, if any has one; `pooled`: whether a slice's hidden states are
    wanted, if any's are."""
    lengths = np.fromiter((piece.num_tokens for piece in slices), np.int64, len(slices))
    starts = np.fromiter((piece.start for piece in slices), np.int64, len(slices))
    ends = starts + lengths
    # Single queries first, then by queries and by context, so that neighbours make groups with little padding.
    order = np.lexsort((ends, lengths))
    ordered = [slices[index] for index in order]
    row_starts = np.cumsum(lengths[order]) - lengths[order]

    token_ids = np.array([token for piece in ordered for token in _tokens(piece)], dtype=np.int64)
    positions = np.arange(token_ids.shape[0]) + np.repeat(starts[order] - row_starts, lengths[order])
    num_blocks = -(-ends[order] // block_size)
    table = np.full((len(slices), int(num_blocks.max())), null_block, dtype=np.int64)
    for row, (piece, count) in enumerate(zip(ordered, num_blocks.tolist(), strict=True)):
        table[row, :count] = piece.block_ids[:count]
    blocks = table[np.repeat(np.arange(len(slices)), lengths[order]), positions // block_size]
    slots = (blocks[:, None] * (2 * num_kv_heads) + np.arange(2 * num_kv_heads)) * block_size
    slots += (positions % block_size)[:, None]

    last_rows = np.empty(len(slices), dtype=np.int64)
    last_rows[order] = row_starts + lengths[order] - 1
    num_sampled = np.fromiter((piece.samples * (1 + piece.num_drafts) for piece in slices), np.int64, len(slices))
    # Of each slice so many rows, the last of which is its last one.
    num_before = num_sampled.cumsum()
    sampled_rows = np.repeat(last_rows + 1 - num_before, num_sampled) + np.arange(num_before[-1])
    fresh = (ends % block_size != 0) & (ends - ends % block_size >= starts)
    fresh_blocks = table[np.arange(len(slices)), num_blocks - 1][fresh[order]]
    groups = []
    if gathered_positions:
        groups = _groups(lengths[order], num_blocks, ends[order] - 1, table, block_size, gathered_positions)
    return Inputs(
        token_ids=_tensor(token_ids, device),
        positions=_tensor(positions, device),
        slots=_tensor(slots, device),
        sampled_rows=_tensor(_with_targets(sampled_rows, slices, last_rows, num_sampled), device),
        fresh_blocks=_tensor(fresh_blocks, device),
        groups=groups,
        ragged=Ragged(
            np.append(row_starts, token_ids.shape[0]).astype(np.int32),
            ends[order].astype(np.int32),
            table.astype(np.int32),
        ),
        row_slots=None if adapters is None else np.repeat(np.asarray(adapters, dtype=np.int32)[order], lengths[order]),
        hidden_rows=None if pooled is None else _tensor(_rows_of(pooled, last_rows + 1 - lengths, lengths), device),
    )


def _rows_of(wanted: Sequence[bool], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    chosen = [np.arange(starts[i], starts[i] + lengths[i]) for i, is_wanted in enumerate(wanted) if is_wanted]
    return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)


def _tokens(piece: SequenceSlice) -> Sequence[int]:
    if piece.token_ids is None:
        raise ValueError(f"sequence {piece.sequence_id}: this engine does not look ahead, so every token must be known")
    return piece.token_ids


def _with_targets(
    sampled_rows: NDArray[np.int64],
    slices: Sequence[SequenceSlice],
    last_rows: NDArray[np.int64],
    num_sampled: NDArray[np.int64],
) -> NDArray[np.int64]:
    if not any(piece.targets for piece in slices):
        return sampled_rows
    parts = []
    own = np.split(sampled_rows, num_sampled.cumsum()[:-1])
    for piece, last_row, rows in zip(slices, last_rows.tolist(), own, strict=True):
        first_row = last_row - piece.num_tokens + 1
        parts += [np.arange(first_row, first_row + len(piece.targets)), rows]
    return np.concatenate(parts)


def _groups(
    lengths: NDArray[np.int64],
    num_blocks: NDArray[np.int64],
    last_positions: NDArray[np.int64],
    table: NDArray[np.int64],
    block_size: int,
    gathered_positions: int,
) -> list[Group]:
    groups: list[Group] = []
    first, first_row = 0, 0
    counts, queries = num_blocks.tolist(), lengths.tolist()
    while first < len(counts):
        end, widest, total = first + 1, counts[first], counts[first]
        while end < len(counts) and (queries[end] == 1) == (queries[first] == 1) and queries[end] < LONG_CHUNK:
            width = max(widest, counts[end])
            padded, needed = width * (end + 1 - first), total + counts[end]
            if padded * block_size > gathered_positions or (padded - needed) * block_size > MOST_PADDING:
                break
            end, widest, total = end + 1, width, needed
        groups.append(Group(first_row, queries[first:end], table[first:end, :widest], last_positions[first:end]))
        first_row += sum(queries[first:end])
        first = end
    return groups


def _tensor(values: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
