"""The results of a sequence's pieces into one (the second half of split-KV attention)."""

import triton.language as tl
from torch import Tensor

from headrace_worker.kernels.attention_math import LOWEST, padded
from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.specialization import Specialization

PIECES = 16
"""Taken in at a time."""


@jit
def _combine(
    partials,
    statistics,
    first_pieces,
    output,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    LOWEST: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_pieces + row)
    num_pieces = tl.load(first_pieces + row + 1) - first
    if num_pieces == 1:
        return
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < HEAD_DIM
    highest = LOWEST
    total = 0.0
    mixed = tl.zeros((BLOCK_DIM,), tl.float32)
    for start in range(0, num_pieces, PIECES):
        places = start + tl.arange(0, PIECES)
        is_piece = places < num_pieces
        parts = (first + places).to(tl.int64) * NUM_HEADS + head
        part_highest = tl.load(statistics + 2 * parts, mask=is_piece, other=LOWEST)
        part_total = tl.load(statistics + 2 * parts + 1, mask=is_piece, other=0.0)
        wanted = is_piece[:, None] & inside[None, :]
        part = tl.load(partials + parts[:, None] * HEAD_DIM + dims[None, :], mask=wanted, other=0.0)
        higher = tl.maximum(highest, tl.max(part_highest, axis=0))
        weights = tl.exp2(part_highest - higher)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(part_total * weights, axis=0)
        mixed = mixed * shrink + tl.sum(part * weights[:, None], axis=0)
        highest = higher
    # A row of no sequence has no pieces: zeros.
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    place = output + (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(place, mixed.to(output.dtype.element_ty), mask=inside)


def combine(partials: Tensor, statistics: Tensor, first_pieces: Tensor, output: Tensor) -> None:
    """Part of `attention_decode.attend`, which has checked all of it."""
    num_rows, num_heads, head_dim = output.shape
    _combine[(num_rows, num_heads)](
        partials,
        statistics,
        first_pieces,
        output,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=padded(head_dim),
        PIECES=PIECES,
        LOWEST=LOWEST,
        num_warps=4,
    )


SPECIALIZATIONS = [
    Specialization(
        f"combine[{head_dim}]",
        _combine,
        {"partials": "*fp32", "statistics": "*fp32", "first_pieces": "*i32", "output": "*bf16"},
        {
            "NUM_HEADS": 32,
            "HEAD_DIM": head_dim,
            "BLOCK_DIM": padded(head_dim),
            "PIECES": PIECES,
            "LOWEST": LOWEST,
        },
        {"num_warps": 4},
    )
    for head_dim in (64, 80, 128, 256)
]
