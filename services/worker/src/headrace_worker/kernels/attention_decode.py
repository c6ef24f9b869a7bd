"""Attention of one query a sequence over a paged cache, in pieces of its context (split-KV, "flash-decoding").

Memory bandwidth decides here. A program reads one piece of one key-value head's cache and serves all query heads that
share it. The matrices are turned round, scores = keys x queries: the long side, positions, takes the place of rows, of
which matrix instructions want many, and the few query heads that of columns. The keys and values go through shared
memory several tiles ahead of their use.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from headrace_worker.kernels.attention_arguments import Arguments, checked
from headrace_worker.kernels.attention_combine import combine
from headrace_worker.kernels.attention_math import capped, components
from headrace_worker.kernels.attention_tiles import Tile, capability_of, decode_tile
from headrace_worker.kernels.checks import check_tensor, require
from headrace_worker.kernels.jit import jit


@jit(do_not_specialize=("num_rows", "table_stride"))
def _attend(
    queries,
    pages,
    block_table,
    pieces,
    first_pieces,
    partials,
    statistics,
    output,
    kv_scales,
    inner_scale,
    outer_scale,
    query_stride,
    table_stride,
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    LOWEST: tl.constexpr,
    FP8_FACTOR: tl.constexpr,
):
    kv_head = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    words = tl.arange(0, BLOCK_WORDS)
    offsets = tl.arange(0, TILE)
    heads = kv_head * GROUP + columns
    is_head = columns < GROUP
    is_word = words < WORDS
    inside = is_word[:, None] & is_head[None, :]
    PAGE_WORDS: tl.constexpr = BLOCK_SIZE * WORDS
    num_pieces = tl.load(first_pieces + num_rows)
    value_scale = 1.0
    if FP8:
        inner_scale *= tl.load(kv_scales + kv_head) * FP8_FACTOR
        value_scale = tl.load(kv_scales + NUM_KV_HEADS + kv_head) * FP8_FACTOR
    for piece in range(tl.program_id(1), num_pieces, tl.num_programs(1)):
        row = tl.load(pieces + piece * 4)
        start = tl.load(pieces + piece * 4 + 1)
        stop = tl.load(pieces + piece * 4 + 2)
        num_splits = tl.load(pieces + piece * 4 + 3)
        query = queries + row.to(tl.int64) * query_stride + heads[None, :] * HEAD_DIM
        table = block_table + row.to(tl.int64) * table_stride
        sums = tl.zeros((TILE, COLUMNS), tl.float32)
        highest = tl.full((COLUMNS,), LOWEST, tl.float32)
        mixed = tl.zeros((BLOCK_WORDS, COLUMNS), tl.float32)
        if FP8:
            q = tl.load(query + 2 * words[:, None], mask=inside, other=0.0).to(tl.float16)
            q_odd = tl.load(query + 2 * words[:, None] + 1, mask=inside, other=0.0).to(tl.float16)
            mixed_odd = tl.zeros((BLOCK_WORDS, COLUMNS), tl.float32)
        else:
            q = tl.load(query + words[:, None], mask=inside, other=0.0)
        for first in tl.range(start, stop, TILE, num_stages=STAGES):
            positions = first + offsets
            visible = positions < stop
            block = tl.load(table + positions // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
            page = block * (2 * NUM_KV_HEADS * PAGE_WORDS) + (positions % BLOCK_SIZE) * WORDS + kv_head * PAGE_WORDS
            place = pages + page[:, None] + words[None, :]
            # Zeros behind the end: what an earlier owner left there may be NaN, which no weight of 0 removes.
            keys = tl.load(place, mask=visible[:, None] & is_word[None, :], other=0)
            # Loaded the other way round, values need no transposition in registers and can be loaded ahead like keys.
            place = pages + NUM_KV_HEADS * PAGE_WORDS + page[None, :] + words[:, None]
            values = tl.load(place, mask=visible[None, :] & is_word[:, None], other=0)
            if FP8:
                keys, keys_odd = components(keys, ASSEMBLY)
                scores = tl.dot(keys, q)
                scores = tl.dot(keys_odd, q_odd, scores)
            else:
                scores = tl.dot(keys, q, input_precision=PRECISION)
            scale = inner_scale
            if CAPPED:
                scores = capped(scores, inner_scale)
                scale = outer_scale
            scores = tl.where(visible[:, None], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=0) * scale)
            weights = tl.exp2(tl.fma(scores, scale, -higher[None, :]))
            shrink = tl.exp2(highest - higher)
            highest = higher
            sums = sums * shrink[None, :] + weights
            mixed = mixed * shrink[None, :]
            if FP8:
                mixed_odd = mixed_odd * shrink[None, :]
                weights = weights.to(tl.float16)
                values, values_odd = components(values, ASSEMBLY)
                mixed = tl.dot(values, weights, mixed)
                mixed_odd = tl.dot(values_odd, weights, mixed_odd)
            else:
                mixed = tl.dot(values, weights.to(values.dtype), mixed, input_precision=PRECISION)
        total = tl.sum(sums, axis=0)
        if num_splits == 1:
            result = output + (row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads[None, :]) * HEAD_DIM
            factor = (value_scale / total)[None, :]
            if FP8:
                tl.store(result + 2 * words[:, None], (mixed * factor).to(output.dtype.element_ty), mask=inside)
                result += 1
                tl.store(result + 2 * words[:, None], (mixed_odd * factor).to(output.dtype.element_ty), mask=inside)
            else:
                tl.store(result + words[:, None], (mixed * factor).to(output.dtype.element_ty), mask=inside)
        else:
            split = piece * (NUM_KV_HEADS * GROUP) + heads.to(tl.int64)
            tl.store(statistics + 2 * split, highest, mask=is_head)
            tl.store(statistics + 2 * split + 1, total, mask=is_head)
            partial = partials + split[None, :] * HEAD_DIM
            if FP8:
                tl.store(partial + 2 * words[:, None], mixed * value_scale, mask=inside)
                tl.store(partial + 2 * words[:, None] + 1, mixed_odd * value_scale, mask=inside)
            else:
                tl.store(partial + words[:, None], mixed, mask=inside)


class DecodeWork(NamedTuple):
    """Lists and intermediate results of one batch size, at places that do not change."""

    pieces: Tensor
    """int32 [most, 4]: see `attention_plan.plan_decode`."""
    first_pieces: Tensor
    """int32 [rows + 1]"""
    partials: Tensor
    """float32 [most, num_heads, head_dim]: weighted sums of the values of a piece …"""
    statistics: Tensor
    """float32 [most, num_heads, 2]: … with the largest score, as a power of 2, and the sum of the weights."""


def attend(
    queries: Tensor,
    pages: Tensor,
    block_table: Tensor,
    work: DecodeWork,
    output: Tensor,
    *,
    num_programs: int,
    scale: float,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """queries [rows, num_heads, head_dim] -> output, like queries: row i attends to sequence i up to its context's end.

    The rows of queries may lie apart. pages [blocks, 2, num_kv_heads, block_size, head_dim] in the type of queries, or
    in float8_e4m3fn with kv_scales float32 [2, num_kv_heads], what keys and values are to be multiplied with.
    block_table int32 [rows, blocks]; what lies behind a sequence's last block is not read. work: planned for these
    rows; how far rows see is in the plan. num_programs: over which the pieces of a key-value head are dealt out. scale:
    of the scores; softcap: s -> softcap * tanh(s / softcap). ValueError for what the kernel does not take.
    """
    arguments = checked(queries, pages, block_table, scale=scale, softcap=softcap, kv_scales=kv_scales)
    num_rows, num_heads, head_dim = queries.shape
    at = queries.device
    check_tensor("block_table", block_table, (num_rows, None), (torch.int32,), row_stride=True)
    check_tensor("output", output, queries.shape, (queries.dtype,), device=at)
    check_tensor("work.pieces", work.pieces, (None, 4), (torch.int32,), device=at)
    check_tensor("work.first_pieces", work.first_pieces, (num_rows + 1,), (torch.int32,), device=at)
    most = work.pieces.shape[0]
    check_tensor("work.partials", work.partials, (most, num_heads, head_dim), (torch.float32,), device=at)
    check_tensor("work.statistics", work.statistics, (most, num_heads, 2), (torch.float32,), device=at)
    require(num_programs > 0, f"{num_programs} programs cannot do anything")
    if not num_rows:
        return
    tile = tile or decode_tile(head_dim, arguments.group, arguments.is_fp8, capability_of(at))
    _attend[(arguments.num_kv_heads, min(num_programs, most))](
        queries,
        arguments.words,
        block_table,
        work.pieces,
        work.first_pieces,
        work.partials,
        work.statistics,
        output,
        kv_scales,
        arguments.inner_scale,
        arguments.outer_scale,
        queries.stride(0),
        block_table.stride(0),
        num_rows,
        **decode_constants(arguments, tile),
        **tile.options,
    )
    combine(work.partials, work.statistics, work.first_pieces, output)


def decode_constants(arguments: Arguments, tile: Tile) -> dict[str, object]:
    return {**arguments.constants(), "COLUMNS": tile.rows, "TILE": tile.positions, "STAGES": tile.num_stages}
