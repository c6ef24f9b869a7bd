"""First pass of sampling over the logits: penalties, biases, what is forbidden, what each block knows of its row."""

import triton.language as tl

from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.noise import CHUNK_WIDTH


@jit
def adjust(
    logits,
    slots,
    integers,
    floats,
    counts,
    stop_ids,
    bias_ids,
    biases,
    masks,
    mask_rows,
    scores,
    peaks,
    peak_tokens,
    raw_peaks,
    raw_sums,
    chunk_peaks,
    histograms,
    vocab_size,
    logits_stride,
    mask_stride,
    padded_size,
    NUM_INTEGERS: tl.constexpr,
    NUM_FLOATS: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    MAX_BIASES: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    DRAWS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block). Writes scores [rows, padded_size] where a row draws, peaks, peak_tokens, raw_peaks and
    raw_sums [rows, blocks], chunk_peaks [rows, padded_size / CHUNK]; clears histograms [rows, HISTOGRAM]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    numbers = integers + slot * NUM_INTEGERS
    reals = floats + slot * NUM_FLOATS
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    raw = tl.load(logits + row * logits_stride + tokens, mask=inside, other=-float("inf")).to(tl.float32)
    place = row * num_blocks + block
    # A row with a NaN is as broken as one with an infinity, and easier to find so.
    raw_peak = tl.max(tl.where(raw != raw, float("inf"), raw), axis=0)
    tl.store(raw_peaks + place, raw_peak)
    if LOGPROBS:
        base = tl.where(raw_peak == -float("inf"), 0.0, raw_peak)
        tl.store(raw_sums + place, tl.sum(tl.exp(raw - base), axis=0))
        chunk_peak = tl.max(tl.reshape(raw, (BLOCK // CHUNK_WIDTH, CHUNK_WIDTH)), axis=1)
        chunks = block * (BLOCK // CHUNK_WIDTH) + tl.arange(0, BLOCK // CHUNK_WIDTH)
        tl.store(chunk_peaks + row * (padded_size // CHUNK_WIDTH) + chunks, chunk_peak)

    score = tl.where(raw == raw, raw, -float("inf"))
    if tl.load(numbers + 7) != 0:
        repetition = tl.load(reals + 3).to(tl.float32)
        presence = tl.load(reals + 4).to(tl.float32)
        frequency = tl.load(reals + 5).to(tl.float32)
        seen = tl.load(counts + slot * vocab_size + tokens, mask=inside, other=0)
        times = (seen >> 1).to(tl.float32)
        repeated = tl.where(score > 0, tl.div_rn(score, tl.zeros_like(score) + repetition), score * repetition)
        # As on the CPU, where one token in the output counts for both penalties but is subtracted once.
        repeated -= frequency * times + presence * (times > 0).to(tl.float32)
        score = tl.where(seen > 0, repeated, score)
    num_biases = tl.load(numbers + 6).to(tl.int32)
    for index in range(num_biases):
        token = tl.load(bias_ids + slot * MAX_BIASES + index)
        score += tl.where(tokens == token, tl.load(biases + slot * MAX_BIASES + index), 0.0)
    if tl.load(numbers + 2) < tl.load(numbers + 4):
        num_stop_ids = tl.load(numbers + 5).to(tl.int32)
        for index in range(num_stop_ids):
            token = tl.load(stop_ids + slot * MAX_STOP_IDS + index)
            score = tl.where(tokens == token, -float("inf"), score)
    if masks is not None:
        mask_row = tl.load(mask_rows + row).to(tl.int64)
        if mask_row >= 0:
            words = tl.load(masks + mask_row * mask_stride + tokens // 32, mask=inside, other=0)
            score = tl.where(((words >> (tokens % 32)) & 1) != 0, score, -float("inf"))

    peak, where = tl.max(score, axis=0, return_indices=True)
    tl.store(peaks + place, peak)
    tl.store(peak_tokens + place, block * BLOCK + where)
    if DRAWS:
        if tl.load(reals) > 0:
            tl.store(scores + row * padded_size + tokens, score)
            if histograms is not None:
                if block == 0:
                    for start in range(0, HISTOGRAM, BLOCK):
                        bins = start + tl.arange(0, BLOCK)
                        nothing = tl.zeros((BLOCK,), tl.int64)
                        tl.store(histograms + row * HISTOGRAM + bins, nothing, mask=bins < HISTOGRAM)
