"""New keys and values into the paged cache, in 8 bits if the cache is.

e4m3 (Micikevicius et al., "FP8 formats for deep learning", 2022) is rounded here bit by bit: GPUs before Ada cannot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_worker.kernels.attention_arguments import FP8
from headrace_worker.kernels.attention_math import padded
from headrace_worker.kernels.checks import check_tensor, require
from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.specialization import Specialization

ELEMENTS = 4096
"""Of a program."""


@jit
def _e4m3(values):
    """float32 -> bits of the nearest e4m3 number, ties to even, too large ones to 448."""
    magnitude = tl.minimum(tl.abs(values), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the steps are 2^-9: the last bit of floats from 2^14 on.
    tiny = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, tiny, normal)
    code = tl.where(values != values, 0x7F, code)
    return (code | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@jit(do_not_specialize=("num_rows",))
def _write(
    keys_values,
    slots,
    pages,
    kv_scales,
    token_stride,
    num_rows,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    # A row is one head of one token; heads are those of keys, then those of values.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    is_row = rows < num_rows
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (rows // NUM_HEADS).to(tl.int64)
    heads = rows % NUM_HEADS
    source = keys_values + tokens[:, None] * token_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    values = tl.load(source, mask=inside, other=0.0)
    slot = tl.load(slots + tokens, mask=is_row, other=0)
    place = ((slot // BLOCK_SIZE) * NUM_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = pages + place[:, None] * HEAD_DIM + dims[None, :]
    if kv_scales is None:
        tl.store(target, values, mask=inside)
    else:
        scales = tl.load(kv_scales + heads)
        tl.store(target, _e4m3(values.to(tl.float32) / scales[:, None]), mask=inside)


def write_kv(keys_values: Tensor, slots: Tensor, pages: Tensor, kv_scales: Tensor | None = None) -> None:
    """keys_values [tokens, 2 * num_kv_heads, head_dim], keys first; tokens may lie apart. slots int64 [tokens]: block *
    block_size + position in the block, each at most once except in a block that nobody reads. pages [blocks, 2,
    num_kv_heads, block_size, head_dim]: of one layer, in the type of keys_values, or in float8_e4m3fn with kv_scales
    float32 [2, num_kv_heads], what the numbers are divided by. ValueError for what the kernel does not take.
    """
    types = (torch.float32, torch.bfloat16, torch.float16)
    check_tensor("keys_values", keys_values, (None, None, None), types, row_stride=True)
    num_tokens, num_heads, head_dim = keys_values.shape
    at = keys_values.device
    require(num_heads % 2 == 0 and num_heads > 0, f"{num_heads} heads are not as many keys as values")
    shape = (None, 2, num_heads // 2, None, head_dim)
    check_tensor("pages", pages, shape, (keys_values.dtype, FP8), device=at)
    check_tensor("slots", slots, (num_tokens,), (torch.int64,), device=at)
    require((kv_scales is not None) == (pages.dtype == FP8), "8-bit keys and values need scales, and only they")
    if kv_scales is not None:
        check_tensor("kv_scales", kv_scales, (2, num_heads // 2), (torch.float32,), device=at)
        pages = pages.view(torch.uint8)
    if not num_tokens:
        return
    rows = _rows(head_dim)
    _write[(triton.cdiv(num_tokens * num_heads, rows),)](
        keys_values,
        slots,
        pages,
        kv_scales,
        keys_values.stride(0),
        num_tokens * num_heads,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=padded(head_dim),
        BLOCK_SIZE=pages.shape[3],
        ROWS=rows,
        num_warps=4,
    )


def _rows(head_dim: int) -> int:
    return ELEMENTS // padded(head_dim)


SPECIALIZATIONS = [
    Specialization(
        f"write_kv[{head_dim}{', fp8' if is_fp8 else ''}]",
        _write,
        {
            "keys_values": "*bf16",
            "slots": "*i64",
            "pages": "*u8" if is_fp8 else "*bf16",
            **({"kv_scales": "*fp32"} if is_fp8 else {}),
            "token_stride": "i32",
            "num_rows": "i32",
        },
        {
            **({} if is_fp8 else {"kv_scales": None}),
            "NUM_HEADS": 16,
            "HEAD_DIM": head_dim,
            "BLOCK_DIM": padded(head_dim),
            "BLOCK_SIZE": 16,
            "ROWS": _rows(head_dim),
        },
        {"num_warps": 4},
        attributes={"token_stride": 16},
    )
    for head_dim in (64, 80, 128, 256)
    for is_fp8 in (False, True)
]
