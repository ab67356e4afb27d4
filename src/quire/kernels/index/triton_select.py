"""The positions of the largest scores of a row, exactly; of equal scores those that come first.

Scores are ordered by their bits, of which each of four kernels counts eight: then the bits of the last score that is
taken are known, and how many of its equals are. The counts of each program stay, too, so that in the end it knows what
the programs before it take, and writes its positions behind theirs.

Floor: five reads of the scores, which lie in the L2 cache.
"""

from __future__ import annotations

from quire.kernels.triton_runtime import jit, tl

LEVELS, BINS = 4, 256  # of eight bits each
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
def level_kernel(
    scores,
    places,
    bins,
    counts,
    stride_scores,
    top_k,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    BINS: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count scores by eight of their bits, those whose bits above are those of the last one. Grid (splits, rows).

    scores   [rows, stride_scores] float32;  places  [rows, 2] position of each row, and another number
    bins     [rows, LEVELS, BINS] counts of each level, in which those of this level are zeros before
    counts   [rows, LEVELS, splits, BINS] int32 counts of each program, output
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split, row = tl.program_id(0), tl.program_id(1)
    begin, end = split * SPLIT, tl.load(places + 2 * row) + 1
    if (end > top_k) & (begin < end):
        own, token, bin = bins + row * (LEVELS * BINS), begin + tl.arange(0, SPLIT), tl.arange(0, BINS)
        known, need, above = token < end, top_k, 0
        order = _ordered(tl.load(scores + row.to(tl.int64) * stride_scores + token, mask=known, other=0.0))
        for level in tl.static_range(LEVEL):
            upper, need = _limit(own + level * BINS, need, BINS)
            above = (above << 8) | upper
        if LEVEL > 0:
            known = known & ((order >> (32 - 8 * LEVEL)).to(tl.int32) == above)
        place = ((order >> (24 - 8 * LEVEL)) & 255).to(tl.int32)
        found = tl.histogram(place, BINS, mask=known)
        tl.store(counts + ((row * LEVELS + LEVEL) * tl.num_programs(0) + split) * BINS + bin, found)
        tl.atomic_add(own + LEVEL * BINS + bin, found, mask=found > 0, sem="relaxed")


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
    LEVELS: tl.constexpr,
    BINS: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the positions that are taken, ascending. Grid (splits, rows). See `level_kernel`.

    positions     [rows, top_k] int32; rows with fewer tokens get all, and -1 behind them
    SPLITS, TOP   number of splits and top_k, padded to powers of two
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split, row = tl.program_id(0), tl.program_id(1)
    begin = split * SPLIT
    end, to = tl.load(places + 2 * row) + 1, positions + row.to(tl.int64) * top_k
    if end <= top_k:
        if begin == 0:
            place = tl.arange(0, TOP)
            tl.store(to + place, tl.where(place < end, place, -1), mask=place < top_k)
    elif begin < end:
        token = begin + tl.arange(0, SPLIT)
        known = token < end
        order = _ordered(tl.load(scores + row.to(tl.int64) * stride_scores + token, mask=known, other=0.0))
        bin, others = tl.arange(0, BINS)[None, :], tl.arange(0, SPLITS)[:, None]
        last, need, above, equals = 0, top_k, 0, 0  # what programs before this one take, and their equals of the last
        for level in tl.static_range(LEVELS):
            upper, need = _limit(bins + (row * LEVELS + level) * BINS, need, BINS)
            last = (last << 8) | upper
            at = counts + ((row * LEVELS + level) * tl.num_programs(0) + others) * BINS + bin
            found = tl.load(at, mask=(others < split) & (bin >= upper), other=0)
            above += tl.sum(tl.sum(tl.where(bin > upper, found, 0), 1), 0)
            if level == LEVELS - 1:
                equals = tl.sum(tl.sum(tl.where(bin == upper, found, 0), 1), 0)
        last = last.to(tl.uint32, bitcast=True)
        equal = (known & (order == last)).to(tl.int32)
        taken = (known & (order > last)) | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= need))
        place = above + tl.minimum(equals, need) + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(to + place, token, mask=taken)
