"""Cuts attention into pieces of work, on the device: lengths need not be known when the work is queued.

One tiny program an iteration writes lists that the kernels of all layers read, so that CUDA graphs stay valid while
lengths change. Decoding: a sequence's context is cut so that all pieces together keep every multiprocessor busy, or,
for results that do not depend on the other sequences, always at the same places. Prompts: tiles of queries, those with
the longest context first in each sequence.
"""

import triton
import triton.language as tl
from torch import Tensor

from headrace_worker.kernels.checks import require
from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.specialization import Specialization

SHORTEST_SPLIT = 256
"""Positions: less is read in less time than another piece takes to be combined."""


@jit(do_not_specialize=("num_rows", "num_wanted", "window", "fixed_split"))
def _plan_decode(
    context_lengths,
    pieces,
    first_pieces,
    num_rows,
    num_wanted,
    window,
    fixed_split,
    SHORTEST: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.arange(0, BLOCK)
    is_row = rows < num_rows
    stops = tl.load(context_lengths + rows, mask=is_row, other=0)
    starts = tl.maximum(stops - window, 0)
    lengths = stops - starts
    total = tl.sum(lengths.to(tl.int64), axis=0)
    if fixed_split > 0:
        split = fixed_split + tl.zeros((BLOCK,), tl.int32)
    else:
        longest = tl.maximum((total + num_wanted - 1) // num_wanted, SHORTEST).to(tl.int32)
        counts = tl.maximum((lengths + longest - 1) // longest, 1)
        # Equal pieces instead of full ones and a rest.
        even = (lengths + counts - 1) // counts
        split = tl.maximum((even + UNIT - 1) // UNIT * UNIT, UNIT)
    counts = (lengths + split - 1) // split
    firsts = tl.cumsum(counts, axis=0) - counts
    tl.store(first_pieces + rows, firsts, mask=is_row)
    tl.store(first_pieces + num_rows, tl.sum(counts, axis=0))
    for number in range(0, tl.max(counts, axis=0)):
        place = pieces + (firsts + number) * 4
        exists = number < counts
        start = starts + number * split
        tl.store(place, rows, mask=exists)
        tl.store(place + 1, start, mask=exists)
        tl.store(place + 2, tl.minimum(start + split, stops), mask=exists)
        tl.store(place + 3, counts, mask=exists)


@jit(do_not_specialize=("first_sequence", "num_sequences", "queries_per_piece"))
def _plan_prefill(query_starts, pieces, first_sequence, num_sequences, queries_per_piece, BLOCK: tl.constexpr):
    sequences = first_sequence + tl.arange(0, BLOCK)
    is_sequence = sequences < num_sequences
    starts = tl.load(query_starts + sequences, mask=is_sequence, other=0)
    ends = tl.load(query_starts + sequences + 1, mask=is_sequence, other=0)
    counts = (ends - starts + queries_per_piece - 1) // queries_per_piece
    firsts = tl.cumsum(counts, axis=0) - counts
    tl.store(pieces, tl.sum(counts, axis=0))
    for number in range(0, tl.max(counts, axis=0)):
        place = pieces + (1 + firsts + number) * 2
        exists = number < counts
        tl.store(place, sequences, mask=exists)
        tl.store(place + 1, (counts - 1 - number) * queries_per_piece, mask=exists)


def plan_decode(
    context_lengths: Tensor,
    pieces: Tensor,
    first_pieces: Tensor,
    *,
    num_wanted: int,
    max_rows: int,
    window: int | None = None,
    fixed_split: int | None = None,
) -> None:
    """context_lengths int32 [rows]; 0: a row of no sequence. max_rows: that there can be; one compilation serves them.

    pieces int32 [most, 4]: (row, first position, end, pieces of this row), by row and position. first_pieces int32
    [rows + 1]: each row's first piece, then their number. num_wanted: pieces over all rows that make good use of the
    GPU; there will be at most `num_wanted + rows`. fixed_split: positions of each piece instead, whatever the batch.
    """
    num_rows = context_lengths.shape[0]
    require(0 < num_rows <= max_rows, f"{num_rows} rows are not between 1 and {max_rows}")
    require(num_wanted > 0, f"{num_wanted} pieces cannot be wanted")
    require(window is None or window > 0, f"no window of {window}")
    require(fixed_split is None or fixed_split > 0, f"no split of {fixed_split}")
    require(fixed_split is not None or pieces.shape[0] >= num_wanted + num_rows, "too few pieces")
    _plan_decode[(1,)](
        context_lengths,
        pieces,
        first_pieces,
        num_rows,
        num_wanted,
        window or (1 << 30),
        fixed_split or 0,
        SHORTEST=SHORTEST_SPLIT,
        UNIT=64,
        BLOCK=triton.next_power_of_2(max_rows),
        num_warps=4,
    )


def plan_prefill(
    query_starts: Tensor, pieces: Tensor, *, first_sequence: int, queries_per_piece: int, max_sequences: int
) -> None:
    """query_starts int32 [sequences + 1]: each one's first row. Cuts those from `first_sequence` on. max_sequences:
    that there can be.

    pieces int32 [1 + most, 2]: the number of pieces, then (sequence, first query) of each.
    """
    num_sequences = query_starts.shape[0] - 1
    require(0 <= first_sequence < num_sequences, f"sequence {first_sequence} of {num_sequences}")
    require(num_sequences <= max_sequences, f"{num_sequences} sequences are more than {max_sequences}")
    require(queries_per_piece > 0, f"no pieces of {queries_per_piece}")
    _plan_prefill[(1,)](
        query_starts,
        pieces,
        first_sequence,
        num_sequences,
        queries_per_piece,
        BLOCK=triton.next_power_of_2(max_sequences),
        num_warps=4,
    )


SPECIALIZATIONS = [
    Specialization(
        "plan_decode",
        _plan_decode,
        {
            "context_lengths": "*i32",
            "pieces": "*i32",
            "first_pieces": "*i32",
            "num_rows": "i32",
            "num_wanted": "i32",
            "window": "i32",
            "fixed_split": "i32",
        },
        {"SHORTEST": SHORTEST_SPLIT, "UNIT": 64, "BLOCK": 256},
        {"num_warps": 4},
    ),
    Specialization(
        "plan_prefill",
        _plan_prefill,
        {
            "query_starts": "*i32",
            "pieces": "*i32",
            "first_sequence": "i32",
            "num_sequences": "i32",
            "queries_per_piece": "i32",
        },
        {"BLOCK": 256},
        {"num_warps": 4},
    ),
]
