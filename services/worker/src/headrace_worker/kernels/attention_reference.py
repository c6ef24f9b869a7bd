"""The attention kernels' functions in plain torch, on the CPU: what they are compared with. Imports no triton."""

import math

import torch
from torch import Tensor

E4M3_MAX = 448.0


def attend(
    queries: Tensor,
    pages: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """queries [tokens, num_heads, head_dim], pages [blocks, 2, num_kv_heads, block_size, head_dim] -> like queries, in
    float64; zeros where a context is empty. kv_scales: [2, num_kv_heads]."""
    output = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    per_kv_head = queries.shape[1] // pages.shape[2]
    starts, lengths = query_starts.tolist(), context_lengths.tolist()
    for sequence, length in enumerate(lengths):
        if not length:
            continue
        rows = slice(starts[sequence], starts[sequence + 1])
        keys, values = gather(pages, block_table[sequence], length, kv_scales)
        keys, values = (part.repeat_interleave(per_kv_head, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries[rows].double(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(length, device=queries.device)
        query_positions = positions[length - (rows.stop - rows.start) :]
        seen = positions[None, :] <= query_positions[:, None]
        if window is not None:
            seen &= positions[None, :] > query_positions[:, None] - window
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values)
    return output


def gather(pages: Tensor, block_ids: Tensor, length: int, kv_scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of a sequence, each [length, num_kv_heads, head_dim] float64."""
    num_blocks = -(-length // pages.shape[3])
    blocks = pages[block_ids[:num_blocks].long()].double()
    if kv_scales is not None:
        blocks = blocks * kv_scales.double()[None, :, :, None, None]
    flat = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    return flat[0], flat[1]


def write_kv(keys_values: Tensor, slots: Tensor, pages: Tensor, kv_scales: Tensor | None = None) -> None:
    """See `kv_write.write_kv`."""
    block_size = pages.shape[3]
    rows = keys_values.reshape(keys_values.shape[0], 2, -1, keys_values.shape[2])
    if kv_scales is not None:
        rows = (rows.float() / kv_scales[None, :, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        pages[slot // block_size, :, :, slot % block_size] = row.to(pages.dtype)


def copy_blocks(pages: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """See `block_copy.copy_blocks`."""
    pages[:, destinations] = pages[:, sources]
