"""Attention of several queries a sequence over a paged cache: prompt chunks, with whatever is cached before them.

Compute decides here. A program takes a tile of rows, each one query of one of the heads that share a key-value head, so
that short chunks fill matrix instructions too, and walks over the keys from the first one (online softmax, Dao,
"FlashAttention-2", 2023). Tiles of keys lie at multiples of their size and rows do not meet in any sum: a row's result
is the same whatever chunk it came in and whoever is in the batch.
"""

import torch
import triton.language as tl
from torch import Tensor

from headrace_worker.kernels.attention_arguments import Arguments, checked
from headrace_worker.kernels.attention_math import capped, components
from headrace_worker.kernels.attention_tiles import Tile, capability_of, prefill_tile
from headrace_worker.kernels.checks import check_tensor, require
from headrace_worker.kernels.jit import jit


@jit
def _walk(
    q,
    q_odd,
    mixed,
    mixed_odd,
    highest,
    total,
    first,
    last,
    stop,
    query_positions,
    pages,
    table,
    kv_head,
    inner_scale,
    outer_scale,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Takes in the keys [first, last); those from `stop` on do not exist. MASKED: some are not seen by every row."""
    PAGE_WORDS: tl.constexpr = BLOCK_SIZE * WORDS
    words = tl.arange(0, BLOCK_WORDS)
    offsets = tl.arange(0, TILE)
    is_word = words < WORDS
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        positions = start + offsets
        exists = positions < stop
        if MASKED:
            block = tl.load(table + positions // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        else:
            block = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
        page = block * (2 * NUM_KV_HEADS * PAGE_WORDS) + (positions % BLOCK_SIZE) * WORDS + kv_head * PAGE_WORDS
        place = pages + page[:, None] + words[None, :]
        if MASKED:
            # Zeros behind the end: what an earlier owner left there may be NaN, which no weight of 0 removes.
            keys = tl.load(place, mask=exists[:, None] & is_word[None, :], other=0)
            values = tl.load(place + NUM_KV_HEADS * PAGE_WORDS, mask=exists[:, None] & is_word[None, :], other=0)
        elif WORDS == BLOCK_WORDS:
            keys = tl.load(place)
            values = tl.load(place + NUM_KV_HEADS * PAGE_WORDS)
        else:
            keys = tl.load(place, mask=is_word[None, :], other=0)
            values = tl.load(place + NUM_KV_HEADS * PAGE_WORDS, mask=is_word[None, :], other=0)
        if FP8:
            keys, keys_odd = components(keys, ASSEMBLY)
            scores = tl.dot(q, keys.T)
            scores = tl.dot(q_odd, keys_odd.T, scores)
        else:
            scores = tl.dot(q, keys.T, input_precision=PRECISION)
        scale = inner_scale
        if CAPPED:
            scores = capped(scores, inner_scale)
            scale = outer_scale
        if MASKED:
            seen = positions[None, :] <= query_positions[:, None]
            if WINDOW:
                seen &= positions[None, :] > query_positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        # Fused by name: the compiler must not round one of the loops otherwise than another.
        weights = tl.exp2(tl.fma(scores, scale, -higher[:, None]))
        shrink = tl.exp2(highest - higher)
        highest = higher
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None]
        if FP8:
            mixed_odd = mixed_odd * shrink[:, None]
            weights = weights.to(tl.float16)
            values, values_odd = components(values, ASSEMBLY)
            mixed = tl.dot(weights, values, mixed)
            mixed_odd = tl.dot(weights, values_odd, mixed_odd)
        else:
            mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
    return mixed, mixed_odd, highest, total


@jit(do_not_specialize=("table_stride",))
def _attend(
    queries,
    pages,
    block_table,
    query_starts,
    context_lengths,
    pieces,
    output,
    kv_scales,
    inner_scale,
    outer_scale,
    query_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    LOWEST: tl.constexpr,
    FP8_FACTOR: tl.constexpr,
):
    kv_head = tl.program_id(0)
    if tl.program_id(1) >= tl.load(pieces):
        return
    piece = pieces + 2 + tl.program_id(1) * 2
    sequence = tl.load(piece)
    first_query = tl.load(piece + 1)
    first_row = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_row
    context = tl.load(context_lengths + sequence)
    QUERIES: tl.constexpr = ROWS // GROUP
    rows = tl.arange(0, ROWS)
    words = tl.arange(0, BLOCK_WORDS)
    ordinals = first_query + rows // GROUP
    is_row = (rows < QUERIES * GROUP) & (ordinals < num_queries)
    inside = is_row[:, None] & (words < WORDS)[None, :]
    heads = kv_head * GROUP + rows % GROUP
    tokens = (first_row + ordinals).to(tl.int64)
    query = queries + tokens[:, None] * query_stride + heads[:, None] * HEAD_DIM
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, BLOCK_WORDS), tl.float32)
    if FP8:
        q = tl.load(query + 2 * words[None, :], mask=inside, other=0.0).to(tl.float16)
        q_odd = tl.load(query + 2 * words[None, :] + 1, mask=inside, other=0.0).to(tl.float16)
        mixed_odd = tl.zeros((ROWS, BLOCK_WORDS), tl.float32)
        inner_scale *= tl.load(kv_scales + kv_head) * FP8_FACTOR
    else:
        q = tl.load(query + words[None, :], mask=inside, other=0.0)
        q_odd = 0.0
        mixed_odd = 0.0
    lowest_position = context - num_queries + first_query
    highest_position = tl.minimum(lowest_position + QUERIES, context) - 1
    # Keys that every row sees lie in [full, partial); before them some are out of a row's window, behind them some are
    # in a row's future.
    stop = highest_position + 1
    start = 0
    if WINDOW:
        start = tl.maximum(lowest_position - WINDOW + 1, 0) // TILE * TILE
    partial = tl.maximum((lowest_position + 1) // TILE * TILE, start)
    full = start
    query_positions = lowest_position + rows // GROUP
    table = block_table + sequence.to(tl.int64) * table_stride
    if WINDOW:
        full = tl.cdiv(tl.maximum(highest_position - WINDOW + 1, 0), TILE) * TILE
        full = tl.minimum(tl.maximum(full, start), partial)
        mixed, mixed_odd, highest, total = _walk(
            q, q_odd, mixed, mixed_odd, highest, total, start, full, stop, query_positions, pages, table, kv_head,
            inner_scale, outer_scale, True, NUM_KV_HEADS, WORDS, BLOCK_WORDS, BLOCK_SIZE, TILE, WINDOW, CAPPED, FP8,
            ASSEMBLY, PRECISION, STAGES,
        )  # fmt: skip
    mixed, mixed_odd, highest, total = _walk(
        q, q_odd, mixed, mixed_odd, highest, total, full, partial, stop, query_positions, pages, table, kv_head,
        inner_scale, outer_scale, False, NUM_KV_HEADS, WORDS, BLOCK_WORDS, BLOCK_SIZE, TILE, WINDOW, CAPPED, FP8,
        ASSEMBLY, PRECISION, STAGES,
    )  # fmt: skip
    mixed, mixed_odd, highest, total = _walk(
        q, q_odd, mixed, mixed_odd, highest, total, partial, stop, stop, query_positions, pages, table, kv_head,
        inner_scale, outer_scale, True, NUM_KV_HEADS, WORDS, BLOCK_WORDS, BLOCK_SIZE, TILE, WINDOW, CAPPED, FP8,
        ASSEMBLY, PRECISION, STAGES,
    )  # fmt: skip
    # Addresses that the compiler takes for others than the queries' (the grid's third number is always 0): kept through
    # the loops, those would take registers that the loops need.
    rows += tl.program_id(2)
    ordinals = first_query + rows // GROUP
    tokens = (first_row + ordinals).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    inside = ((rows < QUERIES * GROUP) & (ordinals < num_queries))[:, None] & (words < WORDS)[None, :]
    result = output + (tokens[:, None] * (NUM_KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM
    # A sequence without any position: zeros.
    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    if FP8:
        factor *= tl.load(kv_scales + NUM_KV_HEADS + kv_head) * FP8_FACTOR
        tl.store(result + 2 * words[None, :], (mixed * factor[:, None]).to(output.dtype.element_ty), mask=inside)
        result += 1
        tl.store(result + 2 * words[None, :], (mixed_odd * factor[:, None]).to(output.dtype.element_ty), mask=inside)
    else:
        tl.store(result + words[None, :], (mixed * factor[:, None]).to(output.dtype.element_ty), mask=inside)


def queries_per_piece(num_heads: int, num_kv_heads: int, head_dim: int, pages: Tensor, tile: Tile | None = None) -> int:
    """What `attention_plan.plan_prefill` is to be given for these pages."""
    tile = tile or prefill_tile(head_dim, pages.dtype.itemsize == 1, capability_of(pages.device))
    return tile.rows // (num_heads // num_kv_heads)


def attend(
    queries: Tensor,
    pages: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    pieces: Tensor,
    output: Tensor,
    *,
    num_pieces: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """queries [tokens, num_heads, head_dim] -> output, like queries: those of the sequences that `pieces` names.

    Queries are the last positions of their sequences. query_starts int32 [sequences + 1]: each one's first row, then
    the number of rows; context_lengths int32 [sequences]: positions up to and with the last query; block_table int32
    [sequences, blocks]. pieces: see `attention_plan.plan_prefill`; num_pieces: at least as many as it made. window: a
    query sees that many positions, its own included. The rest as in `attention_decode.attend`. ValueError for what the
    kernel does not take.
    """
    arguments = checked(queries, pages, block_table, scale=scale, softcap=softcap, kv_scales=kv_scales)
    at = queries.device
    check_tensor("output", output, queries.shape, (queries.dtype,), device=at)
    check_tensor("context_lengths", context_lengths, (block_table.shape[0],), (torch.int32,), device=at)
    check_tensor("query_starts", query_starts, (block_table.shape[0] + 1,), (torch.int32,), device=at)
    check_tensor("pieces", pieces, (None, 2), (torch.int32,), device=at)
    require(0 <= num_pieces < pieces.shape[0], f"there is no room for {num_pieces} pieces")
    require(window is None or window > 0, f"no window of {window}")
    if not num_pieces:
        return
    tile = tile or prefill_tile(arguments.head_dim, arguments.is_fp8, capability_of(at))
    require(arguments.group <= tile.rows, f"a tile of {tile.rows} rows is too small for {arguments.group} heads")
    _attend[(arguments.num_kv_heads, num_pieces, 1)](
        queries,
        arguments.words,
        block_table,
        query_starts,
        context_lengths,
        pieces,
        output,
        kv_scales,
        arguments.inner_scale,
        arguments.outer_scale,
        queries.stride(0),
        block_table.stride(0),
        **prefill_constants(arguments, tile, window),
        **tile.options,
    )


def prefill_constants(arguments: Arguments, tile: Tile, window: int | None) -> dict[str, object]:
    return {
        **arguments.constants(),
        "ROWS": tile.rows,
        "TILE": tile.positions,
        "STAGES": tile.num_stages,
        "WINDOW": window or 0,
    }
