"""The positions of the largest scores of a row, exactly; of equal scores those that come first.

Scores are ordered by their bits, of which each of three kernels counts some: after the third, the bits of the last
score that is taken are known, and how many of its equals are. Then each program counts what it takes of its tokens,
and writes their positions behind those of the programs before it.

Floor: five reads of the scores, which lie in the L2 cache.
"""

from __future__ import annotations

from quire.kernels.triton_runtime import jit, tl

BINS = 2048  # of a level: 11, 11 and 10 bits
SPLIT = 8192  # tokens of a program


@jit
def _ordered(score):
    """Return integers in the order of float32 scores; what is not a number is the largest."""
    bits = score.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return tl.where(score == score, order, -1).to(tl.uint32, bitcast=True)


@jit
def _limit(bins, need, BINS: tl.constexpr):
    """Return the bin in which the need-th largest number is, and how many of that bin are needed."""
    sums = tl.cumsum(tl.load(bins + tl.arange(0, BINS)), 0, reverse=True)
    reached = sums >= need
    return tl.sum(reached.to(tl.int32), 0) - 1, need - tl.max(tl.where(reached, 0, sums), 0)


@jit
def _last(bins, top_k, BINS: tl.constexpr):
    """Return the order of the last score that is taken, and how many of its equals are taken."""
    upper, need = _limit(bins, top_k, BINS)
    middle, need = _limit(bins + BINS, need, BINS)
    lower, need = _limit(bins + 2 * BINS, need, BINS)
    return ((upper << 21) | (middle << 10) | lower).to(tl.uint32, bitcast=True), need


@jit
def level_kernel(
    scores,
    places,
    bins,
    stride_scores,
    top_k,
    LEVEL: tl.constexpr,
    BINS: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count scores by some of their bits, those whose bits above are those of the last one. Grid (splits, rows).

    scores   [rows, stride_scores] float32;  places  [rows, 2] position of each row, and another number
    bins     [rows, 3, BINS] counts of each level, in which those of this level are zeros before
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin, row = tl.program_id(0) * SPLIT, tl.program_id(1)
    end = tl.load(places + 2 * row) + 1
    if (end > top_k) & (begin < end):
        own, token = bins + row * (3 * BINS), begin + tl.arange(0, SPLIT)
        known = token < end
        order = _ordered(tl.load(scores + row.to(tl.int64) * stride_scores + token, mask=known, other=0.0))
        if LEVEL == 0:
            place = order >> 21
        else:
            upper, need = _limit(own, top_k, BINS)
            known = known & ((order >> 21).to(tl.int32) == upper)
            if LEVEL == 1:
                place = (order >> 10) & 2047
            else:
                middle, _ = _limit(own + BINS, need, BINS)
                known = known & (((order >> 10) & 2047).to(tl.int32) == middle)
                place = order & 1023
        found = tl.histogram(place.to(tl.int32), BINS, mask=known)
        tl.atomic_add(own + LEVEL * BINS + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")


@jit
def count_kernel(
    scores,
    places,
    bins,
    counts,
    stride_scores,
    top_k,
    BINS: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the scores above the last one, and its equals. Grid (splits, rows). See `level_kernel`.

    counts   [rows, splits, 2] int32, output
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin, row = tl.program_id(0) * SPLIT, tl.program_id(1)
    end = tl.load(places + 2 * row) + 1
    if (end > top_k) & (begin < end):
        token = begin + tl.arange(0, SPLIT)
        known = token < end
        order = _ordered(tl.load(scores + row.to(tl.int64) * stride_scores + token, mask=known, other=0.0))
        last, _ = _last(bins + row * (3 * BINS), top_k, BINS)
        to = counts + 2 * (row * tl.num_programs(0) + tl.program_id(0))
        tl.store(to, tl.sum((known & (order > last)).to(tl.int32), 0))
        tl.store(to + 1, tl.sum((known & (order == last)).to(tl.int32), 0))


@jit
def write_kernel(
    scores,
    places,
    bins,
    counts,
    positions,
    stride_scores,
    top_k,
    SPLITS: tl.constexpr,
    TOP: tl.constexpr,
    BINS: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the positions that are taken, ascending. Grid (splits, rows). See `level_kernel` and `count_kernel`.

    positions     [rows, top_k] int32; rows with fewer tokens get all, and -1 behind them
    SPLITS, TOP   number of splits and top_k, padded to powers of two
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin, row = tl.program_id(0) * SPLIT, tl.program_id(1)
    end, to = tl.load(places + 2 * row) + 1, positions + row.to(tl.int64) * top_k
    if end <= top_k:
        if begin == 0:
            place = tl.arange(0, TOP)
            tl.store(to + place, tl.where(place < end, place, -1), mask=place < top_k)
    elif begin < end:
        token = begin + tl.arange(0, SPLIT)
        known = token < end
        order = _ordered(tl.load(scores + row.to(tl.int64) * stride_scores + token, mask=known, other=0.0))
        last, need = _last(bins + row * (3 * BINS), top_k, BINS)
        split = tl.arange(0, SPLITS)
        before, at = split < tl.program_id(0), counts + 2 * (row * tl.num_programs(0) + split)
        above = tl.sum(tl.load(at, mask=before, other=0), 0)
        equals = tl.sum(tl.load(at + 1, mask=before, other=0), 0)
        equal = (known & (order == last)).to(tl.int32)
        taken = (known & (order > last)) | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= need))
        place = above + tl.minimum(equals, need) + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(to + place, token, mask=taken)
