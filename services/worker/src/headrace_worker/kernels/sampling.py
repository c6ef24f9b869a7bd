"""Draws the next tokens of a batch on the device: those that `headrace_worker.sampling` draws, but for rounding. The
host waits for nothing, and all of it can be captured in a CUDA graph."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from headrace_worker.kernels.checks import check_tensor, require
from headrace_worker.kernels.rows import ELEMENT_TYPES
from headrace_worker.kernels.sampling_draw import finish, likeliest, run_chunks
from headrace_worker.kernels.sampling_filter import HISTOGRAM, NUM_STEPS, refine, shift_of
from headrace_worker.kernels.sampling_scores import adjust
from headrace_worker.kernels.sampling_table import FLOATS, INTEGERS, MAX_BIASES, MAX_STOP_IDS, Need, SamplingTable
from headrace_worker.race import CHUNK

BLOCK = 4096
"""Tokens that a program handles."""
REFINE_WARPS = 16
"""With 8, an element more a thread does not fit the registers of sm_80."""
MOST_LOGPROBS = 64
"""They are found one after the other."""


class Masks(NamedTuple):
    """Which tokens some of the rows may get."""

    words: Tensor
    """[masks, ceil(vocab_size / 32)] int32: bit t % 32 of word t // 32 for token t."""
    rows: Tensor
    """[rows] int32: each row's mask, -1 for a row that may get any token."""


class Sampled(NamedTuple):
    tokens: Tensor
    """[rows] int64; 0 where the logits are not finite, or where a row has no slot."""
    finite: Tensor
    """[rows] int8; 0: the row has no token, and its slot has not moved on."""
    logprobs: Tensor | None
    """[rows] float32: of the token, from the bare logits."""
    top_ids: Tensor | None
    """[rows, num_logprobs] int32, the likeliest first."""
    top_logprobs: Tensor | None
    """[rows, num_logprobs] float32."""


def sample(
    logits: Tensor,
    slots: Tensor,
    table: SamplingTable,
    need: Need,
    *,
    masks: Masks | None = None,
    work: "Workspace | None" = None,
) -> Sampled:
    """logits [rows, vocab_size] of any float type, rows may lie apart; slots [rows] int32: each row's place in the
    table, -1 for a row to be left out. No slot may be there twice. `need` must cover what the slots were assigned.
    Every sequence's slot learns of its token. work: made for as many rows and the same need; otherwise allocated here.
    ValueError for what the kernels do not take."""
    check_tensor("logits", logits, (None, table.vocab_size), ELEMENT_TYPES, device=table.device, row_stride=True)
    num_rows, vocab_size = logits.shape
    check_tensor("slots", slots, (num_rows,), (torch.int32,), device=table.device)
    if masks is not None:
        check_tensor("masks", masks.words, (None, -(-vocab_size // 32)), (torch.int32,), device=table.device)
        check_tensor("rows of masks", masks.rows, (num_rows,), (torch.int32,), device=table.device)
    num_logprobs = need.num_logprobs
    require(num_logprobs is None or 0 <= num_logprobs <= min(MOST_LOGPROBS, vocab_size), f"{num_logprobs} logprobs")
    work = work or Workspace.for_rows(num_rows, vocab_size, need, table.device)
    result = Sampled(
        torch.empty(num_rows, dtype=torch.int64, device=table.device),
        torch.empty(num_rows, dtype=torch.int8, device=table.device),
        None if num_logprobs is None else torch.empty(num_rows, dtype=torch.float32, device=table.device),
        torch.empty((num_rows, num_logprobs), dtype=torch.int32, device=table.device) if num_logprobs else None,
        torch.empty((num_rows, num_logprobs), dtype=torch.float32, device=table.device) if num_logprobs else None,
    )
    if not num_rows:
        return result
    num_blocks = work.peaks.shape[1]
    padded_size = num_blocks * BLOCK
    blocks = triton.next_power_of_2(num_blocks)
    sizes = {"NUM_INTEGERS": len(INTEGERS), "NUM_FLOATS": len(FLOATS)}
    adjust[(num_rows, num_blocks)](
        logits,
        slots,
        table.integers,
        table.floats,
        table.counts,
        table.stop_ids,
        table.bias_ids,
        table.biases,
        None if masks is None else masks.words,
        None if masks is None else masks.rows,
        work.scores,
        work.peaks,
        work.peak_tokens,
        work.raw_peaks,
        work.raw_sums,
        work.chunk_peaks,
        work.histograms,
        vocab_size,
        logits.stride(0),
        -(-vocab_size // 32),
        padded_size,
        **sizes,
        MAX_STOP_IDS=MAX_STOP_IDS,
        MAX_BIASES=MAX_BIASES,
        HISTOGRAM=HISTOGRAM,
        DRAWS=need.draws,
        LOGPROBS=num_logprobs is not None,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,  # a product that is not rounded before it is subtracted would not equal the CPU's
    )
    if need.draws:
        for step in range(NUM_STEPS if need.filters else 1):
            refine[(num_rows, num_blocks)](
                slots,
                table.integers,
                table.floats,
                work.scores,
                work.peaks,
                work.histograms,
                work.prefixes,
                work.targets,
                work.floors,
                padded_size,
                num_blocks,
                **sizes,
                STEP=step,
                SHIFT=shift_of(step),
                FILTERS=need.filters,
                BLOCK=BLOCK,
                BLOCKS=blocks,
                num_warps=REFINE_WARPS,
            )
        run_chunks[(num_rows, num_blocks)](
            slots,
            table.integers,
            table.floats,
            work.scores,
            work.histograms,
            work.prefixes,
            work.targets,
            work.floors,
            work.arrivals,
            work.arrival_chunks,
            padded_size,
            **sizes,
            FILTERS=need.filters,
            BLOCK=BLOCK,
            num_warps=8,
        )
    finish[(num_rows,)](
        logits,
        slots,
        table.integers,
        table.floats,
        table.counts,
        work.scores,
        work.peaks,
        work.peak_tokens,
        work.raw_peaks,
        work.raw_sums,
        work.floors,
        work.arrivals,
        work.arrival_chunks,
        result.tokens,
        result.finite,
        result.logprobs,
        work.totals,
        vocab_size,
        logits.stride(0),
        padded_size,
        num_blocks,
        **sizes,
        DRAWS=need.draws,
        FILTERS=need.filters,
        LOGPROBS=num_logprobs is not None,
        BLOCKS=blocks,
        num_warps=4,
    )
    if num_logprobs:
        likeliest[(num_rows,)](
            logits,
            slots,
            result.finite,
            work.chunk_peaks,
            work.totals,
            result.top_ids,
            result.top_logprobs,
            vocab_size,
            logits.stride(0),
            padded_size // CHUNK,
            num_logprobs,
            CHUNKS=triton.next_power_of_2(padded_size // CHUNK),
            num_warps=4,
        )
    return result


class Workspace(NamedTuple):
    """What passes from one kernel to the next. None: nobody needs it."""

    peaks: Tensor
    peak_tokens: Tensor
    raw_peaks: Tensor
    raw_sums: Tensor | None
    chunk_peaks: Tensor | None
    totals: Tensor | None
    scores: Tensor | None
    histograms: Tensor | None
    prefixes: Tensor | None
    targets: Tensor | None
    floors: Tensor | None
    """[rows] int32: the bits of the smallest weight that top-k and top-p keep."""
    arrivals: Tensor | None
    arrival_chunks: Tensor | None

    @classmethod
    def for_rows(cls, num_rows: int, vocab_size: int, need: Need, device: torch.device) -> "Workspace":
        num_blocks = triton.cdiv(vocab_size, BLOCK)

        def tensor(*shape: int, dtype: torch.dtype = torch.float32, needed: bool = True) -> Tensor | None:
            return torch.empty((num_rows, *shape), dtype=dtype, device=device) if needed else None

        logprobs, filters = need.num_logprobs is not None, need.draws and need.filters
        return cls(
            peaks=torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device),
            peak_tokens=torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device),
            raw_peaks=torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device),
            raw_sums=tensor(num_blocks, needed=logprobs),
            chunk_peaks=tensor(num_blocks * BLOCK // CHUNK, needed=logprobs),
            totals=tensor(needed=logprobs),
            scores=tensor(num_blocks * BLOCK, needed=need.draws),
            histograms=tensor(HISTOGRAM, dtype=torch.int64, needed=filters),
            prefixes=tensor(NUM_STEPS, dtype=torch.int32, needed=filters),
            targets=tensor(NUM_STEPS, dtype=torch.float64, needed=filters),
            floors=tensor(dtype=torch.int32, needed=filters),
            arrivals=tensor(num_blocks, dtype=torch.float64, needed=need.draws),
            arrival_chunks=tensor(num_blocks, dtype=torch.int32, needed=need.draws),
        )
