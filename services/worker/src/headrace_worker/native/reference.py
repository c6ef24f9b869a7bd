"""The kernels' functions in plain torch: what they are compared with in tests and benchmarks. A worker without
kernels runs `models/decoder.py` and `attention/cpu.py`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [rows, inputs], weight [outputs, inputs] -> [rows, outputs]"""
    return F.linear(rows, weight, bias)


def paged_attention(
    queries: Tensor,
    pages: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    block_table: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """queries [rows, num_heads, head_dim], pages [blocks, 2, num_kv_heads, block_size, head_dim] -> like queries."""
    num_heads, head_dim = queries.shape[1:]
    num_kv_heads = pages.shape[2]
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for index, length in enumerate(context_lengths.tolist()):
        rows = slice(starts[index], starts[index + 1])
        num_blocks = -(-length // pages.shape[3])
        # [2, kv heads, positions, head_dim]
        cached = pages[block_table[index, :num_blocks].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        keys, values = cached.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
        own = queries[rows].float().transpose(0, 1)
        scores = own @ keys.transpose(1, 2) * (scale or 1.0 / math.sqrt(head_dim))
        positions = torch.arange(length - own.shape[1], length)
        hidden = torch.arange(length)[None, :] > positions[:, None]
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        output[rows] = (weights @ values).transpose(0, 1).to(queries.dtype)
    return output


def values_paired(pages: Tensor) -> Tensor:
    """pages [blocks, 2, num_kv_heads, block_size, head_dim] with values as the kernels keep them: bfloat16 ones of
    blocks of a multiple of 16 positions as [block_size / 2, head_dim, 2]."""
    if pages.dtype != torch.bfloat16 or pages.shape[3] % 16:
        return pages
    paired = pages.clone()
    values = pages[:, 1]
    by_pair = values.reshape(*values.shape[:2], -1, 2, values.shape[3]).transpose(3, 4)
    paired[:, 1] = by_pair.reshape(values.shape)
    return paired


def rms_norm(rows: Tensor, *, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """[rows, size] -> [rows, size]. With `residual`, adds rows to it in place and normalizes the sum."""
    if residual is not None:
        rows = residual.add_(rows)
    wide = rows.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)).to(rows.dtype)


def rotate_and_write(qkv: Tensor, rotations: Tensor, slots: Tensor, pages: Tensor) -> None:
    """qkv [tokens, num_heads + 2 * num_kv_heads, head_dim], rotations [tokens, head_dim / 2] complex64, slots [tokens,
    2 * num_kv_heads]: rows of head_dim in pages."""
    num_kv_heads = pages.shape[2]
    rotating = qkv[:, : qkv.shape[1] - num_kv_heads]
    pairs = torch.view_as_complex(rotating.float().reshape(*rotating.shape[:2], -1, 2))
    rotating.copy_(torch.view_as_real(pairs * rotations[:, None]).flatten(-2))
    pages.view(-1, pages.shape[-1])[slots] = qkv[:, qkv.shape[1] - 2 * num_kv_heads :]


def silu_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * size] -> [rows, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def argmax(logits: Tensor) -> Tensor:
    """[rows, vocab_size] -> [rows]"""
    return logits.argmax(dim=-1)
