"""The race of `headrace_worker.race` over a row's weights: blocks first, then the winning chunk, then the books."""

import triton.language as tl

from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.noise import CHUNK_WIDTH, FIRST_TOKEN_CLOCK, first_to_ring, noise_key
from headrace_worker.kernels.sampling_filter import top_p_floor


@jit
def _kept(weights, floor, min_p):
    """The weights that no filter leaves out: floor is the bits of the smallest one."""
    return tl.where((weights.to(tl.int32, bitcast=True) >= floor) & (weights >= min_p), weights, 0.0)


@jit
def run_chunks(
    slots,
    integers,
    floats,
    scores,
    histograms,
    prefixes,
    targets,
    floors,
    arrivals,
    arrival_chunks,
    padded_size,
    NUM_INTEGERS: tl.constexpr,
    NUM_FLOATS: tl.constexpr,
    FILTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block). Writes arrivals, arrival_chunks [rows, blocks]: which chunk of the block rings first, and
    when; floors [rows] becomes the bits of the smallest weight that all filters keep."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    numbers = integers + slot * NUM_INTEGERS
    reals = floats + slot * NUM_FLOATS
    if tl.load(reals) <= 0:
        return
    floor = 0
    if FILTERS:
        if tl.load(reals + 1) < 1.0:
            floor = top_p_floor(histograms, prefixes, targets, row)
            # The blocks beside this one do not read it for such a row.
            if block == 0:
                tl.store(floors + row, floor)
        else:
            floor = tl.load(floors + row)
    weights = tl.load(scores + row * padded_size + block * BLOCK + tl.arange(0, BLOCK))
    weights = _kept(weights, floor, tl.load(reals + 2).to(tl.float32))
    sums = tl.sum(tl.reshape(weights, (BLOCK // CHUNK_WIDTH, CHUNK_WIDTH)), axis=1).to(tl.float64)
    chunks = block * (BLOCK // CHUNK_WIDTH) + tl.arange(0, BLOCK // CHUNK_WIDTH)
    key = noise_key(tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2))
    when, index = first_to_ring(sums, key, chunks.to(tl.int64))
    place = row * tl.num_programs(1) + block
    tl.store(arrivals + place, when)
    tl.store(arrival_chunks + place, block * (BLOCK // CHUNK_WIDTH) + index)


@jit
def finish(
    logits,
    slots,
    integers,
    floats,
    counts,
    scores,
    peaks,
    peak_tokens,
    raw_peaks,
    raw_sums,
    floors,
    arrivals,
    arrival_chunks,
    drawn,
    finite,
    logprobs,
    totals,
    vocab_size,
    logits_stride,
    padded_size,
    num_blocks,
    NUM_INTEGERS: tl.constexpr,
    NUM_FLOATS: tl.constexpr,
    DRAWS: tl.constexpr,
    FILTERS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (row). Writes drawn, finite, logprobs and totals (of the exponentials, as a logarithm) [rows], and counts
    the token in the slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        tl.store(drawn + row, 0)
        tl.store(finite + row, 1)
        return
    numbers = integers + slot * NUM_INTEGERS
    reals = floats + slot * NUM_FLOATS
    blocks = row * num_blocks + tl.arange(0, BLOCKS)
    known = tl.arange(0, BLOCKS) < num_blocks
    raw_block_peaks = tl.load(raw_peaks + blocks, mask=known, other=-float("inf"))
    raw_peak = tl.max(raw_block_peaks, axis=0)
    is_finite = (raw_peak < float("inf")) & (raw_peak > -float("inf"))
    tl.store(finite + row, is_finite.to(tl.int8))
    if not is_finite:
        tl.store(drawn + row, 0)
        return

    best = tl.argmax(tl.load(peaks + blocks, mask=known, other=-float("inf")), axis=0)
    token = tl.load(peak_tokens + row * num_blocks + best).to(tl.int64)
    if DRAWS:
        if tl.load(reals) > 0:
            first = tl.argmin(tl.load(arrivals + blocks, mask=known, other=float("inf")), axis=0)
            start = tl.load(arrival_chunks + row * num_blocks + first).to(tl.int64) * CHUNK_WIDTH
            within = tl.arange(0, CHUNK_WIDTH)
            floor = 0
            if FILTERS:
                floor = tl.load(floors + row)
            weights = tl.load(scores + row * padded_size + start + within)
            weights = _kept(weights, floor, tl.load(reals + 2).to(tl.float32)).to(tl.float64)
            key = noise_key(tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2))
            when, index = first_to_ring(weights, key, start + within.to(tl.int64) + FIRST_TOKEN_CLOCK)
            # If everything that is finite was forbidden there is no weight, and the race has no winner.
            token = tl.where(when < float("inf"), start + index, token)
    tl.store(drawn + row, token)
    if LOGPROBS:
        sums = tl.load(raw_sums + blocks, mask=known, other=0.0)
        bases = tl.where(raw_block_peaks == -float("inf"), 0.0, raw_block_peaks)
        total = raw_peak + tl.log(tl.sum(sums * tl.exp(bases - raw_peak), axis=0))
        tl.store(totals + row, total)
        tl.store(logprobs + row, tl.load(logits + row * logits_stride + token).to(tl.float32) - total)
    if tl.load(numbers + 7) != 0:
        place = counts + slot * vocab_size + token
        tl.store(place, tl.load(place) + 2)
    tl.store(numbers + 2, tl.load(numbers + 2) + 1)


@jit(do_not_specialize=("num_logprobs",))
def likeliest(
    logits,
    slots,
    finite,
    chunk_peaks,
    totals,
    top_ids,
    top_logprobs,
    vocab_size,
    logits_stride,
    num_chunks,
    num_logprobs,
    CHUNKS: tl.constexpr,
):
    """Program (row). Writes top_ids and top_logprobs [rows, num_logprobs], the likeliest first, equals by id. Only the
    chunk of the one just taken is looked at again."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) < 0:
        return
    if tl.load(finite + row) == 0:
        return
    total = tl.load(totals + row)
    chunks = tl.arange(0, CHUNKS)
    within = tl.arange(0, CHUNK_WIDTH)
    peaks = tl.load(chunk_peaks + row * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf"))
    last = tl.max(peaks, axis=0)
    last_token = -1
    for rank in range(num_logprobs):
        best = tl.max(peaks, axis=0)
        chunk = tl.argmax(peaks, axis=0)
        tokens = chunk * CHUNK_WIDTH + within
        values = tl.load(logits + row * logits_stride + tokens, mask=tokens < vocab_size, other=-float("inf"))
        values = values.to(tl.float32)
        left = (values < last) | ((values == last) & (tokens > last_token))
        token = tl.min(tl.where(left & (values == best), tokens, 0x7FFFFFFF), axis=0)
        tl.store(top_ids + row * num_logprobs + rank, token)
        tl.store(top_logprobs + row * num_logprobs + rank, best - total)
        left = (values < best) | ((values == best) & (tokens > token))
        peaks = tl.where(chunks == chunk, tl.max(tl.where(left, values, -float("inf")), axis=0), peaks)
        last = best
        last_token = token
