"""What happens between the large operations, each in one pass over its rows."""

import ctypes

import torch
from torch import Tensor

from headrace_worker.native.attention import HEAD_DIM_STEP
from headrace_worker.native.checks import ELEMENT_TYPES, check_multiple, check_range, check_tensor
from headrace_worker.native.library import Library, load
from headrace_worker.native.structures import AttentionShape


def rms_norm(rows: Tensor, *, epsilon: float, residual: Tensor | None = None, library: Library | None = None) -> Tensor:
    """RMSNorm without a weight: [rows, size] -> [rows, size]. With `residual` (like rows), adds rows to it in place and
    normalizes the sum. ValueError for what the kernel does not take."""
    check_tensor("rows", rows, (None, None), ELEMENT_TYPES)
    if residual is not None:
        check_tensor("residual", residual, rows.shape, (rows.dtype,))
    output = torch.empty_like(rows)
    (library or load()).functions.headrace_rms_norm(
        rows.data_ptr(),
        None if residual is None else residual.data_ptr(),
        *rows.shape,
        epsilon,
        output.data_ptr(),
        int(rows.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )
    return output


def rotate_and_write(
    qkv: Tensor, rotations: Tensor, slots: Tensor, pages: Tensor, *, library: Library | None = None
) -> None:
    """Rotates queries and keys of qkv [tokens, num_heads + 2 * num_kv_heads, head_dim]: queries in place, keys (and the
    values as they are) into pages [blocks, 2, num_kv_heads, block_size, head_dim], values as in
    `reference.values_paired`.

    rotations: [tokens, head_dim / 2] complex64; slots: [tokens, 2 * num_kv_heads] int64, rows of head_dim in the pages.
    ValueError for what the kernel does not take.
    """
    check_tensor("qkv", qkv, (None, None, None), ELEMENT_TYPES)
    num_tokens, num_all, head_dim = qkv.shape
    check_tensor("pages", pages, (None, 2, None, None, head_dim), (qkv.dtype,))
    num_blocks, _, num_kv_heads, block_size, _ = pages.shape
    check_multiple("head size", head_dim, HEAD_DIM_STEP)
    check_multiple("number of heads", num_all - 2 * num_kv_heads, num_kv_heads)
    check_tensor("rotations", rotations, (num_tokens, head_dim // 2), (torch.complex64,))
    check_tensor("slots", slots, (num_tokens, 2 * num_kv_heads), (torch.int64,))
    check_range("slots", slots, num_blocks * 2 * num_kv_heads * block_size)
    if bool((slots.diff() != block_size).any()):
        raise ValueError("the heads of a slot are not a block apart")
    shape = AttentionShape(num_all - 2 * num_kv_heads, num_kv_heads, head_dim, block_size, 0.0)
    (library or load()).functions.headrace_rotate_and_write(
        qkv.data_ptr(),
        num_tokens,
        ctypes.byref(shape),
        rotations.data_ptr(),
        slots.data_ptr(),
        slots.stride(0),
        pages.data_ptr(),
        int(qkv.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )


def silu_mul(gate_up: Tensor, *, library: Library | None = None) -> Tensor:
    """gate_up [rows, 2 * size] -> silu(gate) * up [rows, size]. ValueError for what the kernel does not take."""
    check_tensor("gate_up", gate_up, (None, None), ELEMENT_TYPES)
    check_multiple("width", gate_up.shape[1], 2)
    output = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    (library or load()).functions.headrace_silu_mul(
        gate_up.data_ptr(),
        *output.shape,
        output.data_ptr(),
        int(gate_up.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )
    return output


def argmax(logits: Tensor, *, library: Library | None = None) -> Tensor:
    """logits [rows, vocab_size] -> [rows] int64: the first greatest one; NaN counts as greatest. ValueError for what
    the kernel does not take."""
    check_tensor("logits", logits, (None, None), ELEMENT_TYPES)
    if logits.shape[1] < 1:
        raise ValueError("logits have no columns")
    output = torch.empty(logits.shape[0], dtype=torch.int64)
    (library or load()).functions.headrace_argmax(
        logits.data_ptr(),
        *logits.shape,
        output.data_ptr(),
        int(logits.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )
    return output
