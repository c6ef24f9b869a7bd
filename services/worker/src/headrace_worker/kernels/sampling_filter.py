"""Top-k and top-p without sorting: the bits of a weight, ten at a time, say where the threshold lies.

Weights are floats in [0, 1], whose 30 bits order them as integers. One pass counts the weights by their upper ten bits;
the bin in which the k-th largest lies fixes those bits of the threshold, and the next pass looks into that bin only.
After three passes the threshold is exact, ties included. For top-p, the weights themselves are added up, as integers:
their sum does not depend on the order in which the blocks of a row come to add theirs.
"""

import triton.language as tl

from headrace_worker.kernels.jit import jit

BITS = 10
LEVELS = 3
BINS = 1 << BITS
HISTOGRAM = 2 * LEVELS * BINS
"""Bins of a row: top-k's levels, then top-p's."""
NUM_STEPS = 2 * LEVELS
"""Passes over the weights: top-k's, then top-p's."""
UNIT = float(1 << 44)
"""The weight 1 as an integer: the sum of 2^18 weights fits 63 bits."""

_BITS: tl.constexpr = tl.constexpr(BITS)
_BINS: tl.constexpr = tl.constexpr(BINS)
_LEVELS: tl.constexpr = tl.constexpr(LEVELS)
_HISTOGRAM: tl.constexpr = tl.constexpr(HISTOGRAM)
_NUM_STEPS: tl.constexpr = tl.constexpr(NUM_STEPS)
_UNIT: tl.constexpr = tl.constexpr(UNIT)


def shift_of(step: int) -> int:
    """Where the bits lie that a pass looks at."""
    return (LEVELS - 1 - step % LEVELS) * BITS


@jit
def _select(histogram, target):
    """(the bin, counted from the top, in which the sum reaches the target (float64), what is left for it there)."""
    from_top = tl.arange(0, _BINS)
    amounts = tl.cumsum(tl.load(histogram + (_BINS - 1) - from_top), axis=0)
    missing = amounts.to(tl.float64) < target
    # Never reached (weights of zero are not counted): the lowest bin, that is, everything is kept.
    chosen = tl.maximum(-tl.sum(missing.to(tl.int32), axis=0) + (_BINS - 1), 0)
    return chosen, target - tl.max(tl.where(missing, amounts, 0), axis=0).to(tl.float64)


@jit
def _settled(histograms, prefixes, targets, row, target, STEP: tl.constexpr):
    """After the passes up to STEP: (upper bits of the threshold that are known, what is left to reach below them)."""
    prefix = 0
    if STEP > 0 and STEP != _LEVELS:
        prefix = tl.load(prefixes + row * _NUM_STEPS + STEP - 1)
        target = tl.load(targets + row * _NUM_STEPS + STEP - 1)
    chosen, rest = _select(histograms + row * _HISTOGRAM + STEP * _BINS, target)
    return (prefix << _BITS) | chosen, rest


@jit
def top_p_target(histograms, row, top_p):
    """The sum that the kept weights must reach: all weights counted by top-p's first pass, times p."""
    bins = tl.arange(0, _BINS)
    counted = tl.load(histograms + row * _HISTOGRAM + _LEVELS * _BINS + bins)
    return tl.sum(counted, axis=0).to(tl.float64) * top_p


@jit
def top_p_floor(histograms, prefixes, targets, row):
    """The bits of top-p's threshold after all passes."""
    return _settled(histograms, prefixes, targets, row, 0.0, _NUM_STEPS - 1)[0]


@jit
def refine(
    slots,
    integers,
    floats,
    scores,
    peaks,
    histograms,
    prefixes,
    targets,
    floors,
    padded_size,
    num_blocks,
    NUM_INTEGERS: tl.constexpr,
    NUM_FLOATS: tl.constexpr,
    STEP: tl.constexpr,
    SHIFT: tl.constexpr,
    FILTERS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (row, block) of pass STEP. The first turns scores into weights, in place; each adds its block to
    histograms [rows, HISTOGRAM]. prefixes, targets [rows, NUM_STEPS] carry what the passes found; floors [rows] gets
    the bits of top-k's threshold."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    temperature = tl.load(floats + slot * NUM_FLOATS).to(tl.float32)
    if temperature <= 0:
        return
    top_k = tl.load(integers + slot * NUM_INTEGERS + 3)
    top_p = tl.load(floats + slot * NUM_FLOATS + 1)
    offsets = row * padded_size + block * BLOCK + tl.arange(0, BLOCK)
    floor = 0
    prefix = 0
    if STEP == 0:
        blocks = tl.arange(0, BLOCKS)
        known = blocks < num_blocks
        peak = tl.max(tl.load(peaks + row * num_blocks + blocks, mask=known, other=-float("inf")), axis=0)
        # The likeliest token has weight 1 whatever the temperature, so nothing can overflow.
        difference = tl.load(scores + offsets) - peak
        weights = tl.exp(tl.div_rn(difference, tl.zeros_like(difference) + temperature))
        # Of a row that is not finite, and fails for it.
        weights = tl.where(weights == weights, weights, 0.0)
        tl.store(scores + offsets, weights)
        if FILTERS == 0:
            return
        if top_k <= 0:
            return
    else:
        if STEP < _LEVELS:
            if top_k <= 0:
                return
            prefix, rest = _settled(histograms, prefixes, targets, row, top_k.to(tl.float64), STEP - 1)
        else:
            if STEP == _LEVELS:
                if top_k > 0:
                    floor = _settled(histograms, prefixes, targets, row, 0.0, STEP - 1)[0]
                if block == 0:
                    tl.store(floors + row, floor)
                if top_p >= 1.0:
                    return
            else:
                if top_p >= 1.0:
                    return
                target = 0.0
                if STEP == _LEVELS + 1:
                    target = top_p_target(histograms, row, top_p)
                floor = tl.load(floors + row)
                prefix, rest = _settled(histograms, prefixes, targets, row, target, STEP - 1)
        if STEP != _LEVELS:
            if block == 0:
                tl.store(prefixes + row * _NUM_STEPS + STEP - 1, prefix)
                tl.store(targets + row * _NUM_STEPS + STEP - 1, rest)
        weights = tl.load(scores + offsets)
    bits = weights.to(tl.int32, bitcast=True)
    counted = (bits > 0) & (bits >= floor) & ((bits >> (SHIFT + _BITS)) == prefix)
    bins = (bits >> SHIFT) & (_BINS - 1)
    if STEP < _LEVELS:
        amounts = tl.full((BLOCK,), 1, tl.int64)
    else:
        amounts = (weights.to(tl.float64) * _UNIT).to(tl.int64)
    tl.atomic_add(histograms + row * _HISTOGRAM + STEP * _BINS + bins, amounts, mask=counted, sem="relaxed")
