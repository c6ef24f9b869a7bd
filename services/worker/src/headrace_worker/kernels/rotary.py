"""Rotary position embedding (Su et al., 2021) in place, with the normalization of heads that some models do before."""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_worker.kernels.checks import check_tensor, require
from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.rows import ELEMENT_TYPES
from headrace_worker.kernels.specialization import Specialization

TILE = 2048
"""Elements that a program holds."""

Pairing = Literal["neighbours", "halves"]


@jit
def _rotate(
    qkv,
    rotations,
    query_weight,
    key_weight,
    epsilon,
    token_stride,
    num_rotated,
    num_heads,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pairs = tl.arange(0, BLOCK_PAIRS)
    turning = pairs < ROTARY_DIM // 2
    inside = (heads < num_rotated)[:, None] & (pairs < HEAD_DIM // 2)[None, :]
    tile = qkv + token * token_stride + heads[:, None] * HEAD_DIM
    if NEIGHBOURS:
        columns = tl.arange(0, 2 * BLOCK_PAIRS)
        whole = (heads < num_rotated)[:, None] & (columns < HEAD_DIM)[None, :]
        values = tl.load(tile + columns[None, :], mask=whole, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(values, (BLOCK_HEADS, BLOCK_PAIRS, 2)))
        first_columns = 2 * pairs
        second_columns = first_columns + 1
    else:
        # What is not rotated is handled in neighbouring pairs too, by an angle of zero.
        first_columns = tl.where(turning, pairs, 2 * pairs)
        second_columns = tl.where(turning, pairs + ROTARY_DIM // 2, 2 * pairs + 1)
        first = tl.load(tile + first_columns[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(tile + second_columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if query_weight is not None:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + epsilon)[:, None]
        is_query = (heads < num_heads)[:, None]
        within = pairs < HEAD_DIM // 2
        query_first = tl.load(query_weight + first_columns, mask=within, other=0.0)[None, :]
        query_second = tl.load(query_weight + second_columns, mask=within, other=0.0)[None, :]
        key_first = tl.load(key_weight + first_columns, mask=within, other=0.0)[None, :]
        key_second = tl.load(key_weight + second_columns, mask=within, other=0.0)[None, :]
        first = first * scale * tl.where(is_query, query_first, key_first)
        second = second * scale * tl.where(is_query, query_second, key_second)
    angles = rotations + token * ROTARY_DIM + 2 * pairs
    cosine = tl.load(angles, mask=turning, other=1.0)[None, :]
    sine = tl.load(angles + 1, mask=turning, other=0.0)[None, :]
    turned_first = (first * cosine - second * sine).to(qkv.dtype.element_ty)
    turned_second = (first * sine + second * cosine).to(qkv.dtype.element_ty)
    if NEIGHBOURS:
        turned = tl.reshape(tl.join(turned_first, turned_second), (BLOCK_HEADS, 2 * BLOCK_PAIRS))
        tl.store(tile + columns[None, :], turned, mask=whole)
    else:
        tl.store(tile + first_columns[None, :], turned_first, mask=inside)
        tl.store(tile + second_columns[None, :], turned_second, mask=inside)


def rotate(
    qkv: Tensor,
    num_rotated: int,
    rotations: Tensor,
    *,
    num_heads: int = 0,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    epsilon: float = 0.0,
    pairing: Pairing = "neighbours",
) -> None:
    """Rotates the first `num_rotated` heads of qkv [tokens, heads, head_dim] in place, in float32; tokens may be apart.

    rotations: [tokens, rotary_dim / 2] complex64, as `models/rotary.py` makes them; rotary_dim may be less than
    head_dim: the first components are rotated. pairing: component 2 i with 2 i + 1, or i with i + rotary_dim / 2.
    With the weights [head_dim] float32, each head is first normalized (RMSNorm) by the query weight if it is one of the
    first `num_heads`, else by the key weight. ValueError for what the kernel does not take.
    """
    check_tensor("qkv", qkv, (None, None, None), ELEMENT_TYPES, row_stride=True)
    num_tokens, num_all, head_dim = qkv.shape
    check_tensor("rotations", rotations, (num_tokens, None), (torch.complex64,), device=qkv.device)
    rotary_dim = 2 * rotations.shape[1]
    require(
        head_dim % 2 == 0 and 0 < rotary_dim <= head_dim, f"{rotary_dim} of {head_dim} components cannot be rotated"
    )
    require(0 < num_rotated <= num_all, f"{num_rotated} of {num_all} heads cannot be rotated")
    require((query_weight is None) == (key_weight is None), "queries and keys are normalized both or neither")
    require(pairing in ("neighbours", "halves"), f"no pairing {pairing}")
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        if weight is not None:
            check_tensor(name, weight, (head_dim,), (torch.float32,), device=qkv.device)
            require(0 < num_heads <= num_rotated, f"{num_heads} of {num_rotated} heads cannot be queries")
    if not num_tokens:
        return
    block_pairs, block_heads = _tile(head_dim, num_rotated)
    _rotate[(num_tokens, triton.cdiv(num_rotated, block_heads))](
        qkv,
        torch.view_as_real(rotations),
        query_weight,
        key_weight,
        epsilon,
        qkv.stride(0),
        num_rotated,
        num_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        NEIGHBOURS=pairing == "neighbours",
        BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=block_pairs,
        num_warps=4,
    )


def _tile(head_dim: int, num_rotated: int) -> tuple[int, int]:
    """(pairs, heads) of a program, powers of two."""
    block_pairs = triton.next_power_of_2(head_dim // 2)
    return block_pairs, min(TILE // (2 * block_pairs), triton.next_power_of_2(num_rotated))


SPECIALIZATIONS = [
    Specialization(
        f"rotate[{head_dim}, {'neighbours' if neighbours else 'halves'}{', qk_norm' if norm else ''}]",
        _rotate,
        {
            "qkv": "*bf16",
            "rotations": "*fp32",
            "epsilon": "fp32",
            "token_stride": "i32",
            "num_rotated": "i32",
            "num_heads": "i32",
            **({"query_weight": "*fp32", "key_weight": "*fp32"} if norm else {}),
        },
        {
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": head_dim,
            "NEIGHBOURS": neighbours,
            "BLOCK_PAIRS": _tile(head_dim, 40)[0],
            "BLOCK_HEADS": _tile(head_dim, 40)[1],
            **({} if norm else {"query_weight": None, "key_weight": None}),
        },
        {"num_warps": 4},
        attributes={"token_stride": 16},
    )
    for head_dim, neighbours, norm in ((128, True, False), (128, True, True), (256, True, True), (64, False, False))
]
