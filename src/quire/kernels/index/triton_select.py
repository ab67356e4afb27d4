"""The positions of the largest scores of a row, exactly; of equal scores those that come first.

Scores are ordered by their bits. A context of up to `WHOLE` tokens fits the registers of a program, which finds the
bits of the last score that is taken from the highest on, by counting what is not below. It reads the scores twice.

Longer contexts are split among programs. Each of four kernels counts eight bits: then the bits of the last score are
known, and how many of its equals are taken. The last of them keeps, for each program, its counts of every value of the
lowest eight bits and of what is above each, so that a program knows what the programs before it take, and writes its
positions behind theirs. Five reads of the scores, which lie in the L2 cache.
"""

from __future__ import annotations

from quire.kernels.triton_runtime import jit, tl

LEVELS, BINS = 4, 256  # of eight bits each
WHOLE = 32_768  # tokens of a program with a whole context, 64 in the registers of each thread


@jit
def _ordered(score):
    """Return integers in the order of float32 scores; what is not a number is the largest. None is 0."""
    bits = score.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return tl.where(score == score, order, -1).to(tl.uint32, bitcast=True)


@jit
def _write_all(to, end, top_k, TOP: tl.constexpr):
    """Write the positions of a row that takes all of its `end` tokens, and -1 behind them."""
    place = tl.arange(0, TOP)
    tl.store(to + place, tl.where(place < end, place, -1), mask=place < top_k)


@jit(do_not_specialize_on_alignment=["places"])
def whole_kernel(
    scores,
    places,
    positions,
    stride_scores,
    top_k,
    TOP: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the positions that a row takes of at most WHOLE tokens, ascending. Grid (rows,).

    scores      [rows, stride_scores] float32;  places  [rows, 2] position of each row, and another number
    positions   [rows, top_k] int32, output; rows with fewer tokens get all, and -1 behind them
    TOP         top_k padded to a power of two;  TILE  tokens whose positions are written at a time
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    end, to = tl.load(places + 2 * row) + 1, positions + row.to(tl.int64) * top_k
    if end <= top_k:
        _write_all(to, end, top_k, TOP)
    else:
        token = tl.arange(0, WHOLE)
        score = tl.load(scores + row.to(tl.int64) * stride_scores + token, mask=token < end, other=0.0)
        order = tl.where(token < end, _ordered(score), 0)
        last, found, bit = (end * 0).to(tl.uint32), end * 0, (end * 0 + 1).to(tl.uint32) << 31
        while (found != top_k) & (bit > 0):
            asked = last | bit
            reached = tl.sum((order >= asked).to(tl.int32), 0)
            last = tl.where(reached >= top_k, asked, last)
            found = tl.where(reached >= top_k, reached, found)
            bit = bit >> 1
        need, before = top_k - tl.sum((order > last).to(tl.int32), 0), end * 0  # equals of the last; taken so far
        for begin in tl.range(0, end, TILE):
            at = begin + tl.arange(0, TILE)
            again = tl.load(scores + row.to(tl.int64) * stride_scores + at, mask=at < end, other=0.0)
            own = tl.where(at < end, _ordered(again), 0)
            equal = (own == last).to(tl.int32)
            taken = ((own > last) | ((equal > 0) & (tl.cumsum(equal, 0) <= need))).to(tl.int32)
            tl.store(to + before + tl.cumsum(taken, 0) - 1, at, mask=taken > 0)
            need -= tl.sum(equal, 0)
            before += tl.sum(taken, 0)


@jit
def _limit(bins, need, BINS: tl.constexpr):
    """Return the bin in which the need-th largest number is, and how many of that bin are needed."""
    sums = tl.cumsum(tl.load(bins + tl.arange(0, BINS)), 0, reverse=True)
    reached = sums >= need
    return tl.sum(reached.to(tl.int32), 0) - 1, need - tl.max(tl.where(reached, 0, sums), 0)


@jit(do_not_specialize_on_alignment=["places"])
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
    counts   [rows, 2, splits, BINS] int32 of the last level, output: scores of each program with these lowest bits, and
             scores above them
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split, row = tl.program_id(0), tl.program_id(1)
    begin, end = split * SPLIT, tl.load(places + 2 * row) + 1
    if (end > top_k) & (begin < end):
        own, token, bin = bins + row * (LEVELS * BINS), begin + tl.arange(0, SPLIT), tl.arange(0, BINS)
        known, need, upper = token < end, top_k, 0
        order = _ordered(tl.load(scores + row.to(tl.int64) * stride_scores + token, mask=known, other=0.0))
        for level in tl.static_range(LEVEL):
            one, need = _limit(own + level * BINS, need, BINS)
            upper = (upper << 8) | one
        beyond = 0
        if LEVEL > 0:
            high = order >> (32 - 8 * LEVEL)
            if LEVEL == LEVELS - 1:
                beyond = tl.sum((known & (high > upper.to(tl.uint32))).to(tl.int32), 0)
            known = known & (high == upper.to(tl.uint32))
        found = tl.histogram(((order >> (24 - 8 * LEVEL)) & 255).to(tl.int32), BINS, mask=known)
        tl.atomic_add(own + LEVEL * BINS + bin, found, mask=found > 0, sem="relaxed")
        if LEVEL == LEVELS - 1:
            at = counts + (row.to(tl.int64) * 2 * tl.num_programs(0) + split) * BINS + bin
            tl.store(at, found)
            tl.store(at + tl.num_programs(0) * BINS, beyond + tl.cumsum(found, 0, reverse=True) - found)


@jit(do_not_specialize_on_alignment=["places"])
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
    """Write the positions that are taken, ascending. Grid (splits, rows). See `level_kernel` and `whole_kernel`.

    SPLITS   number of splits, padded to a power of two
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split, row = tl.program_id(0), tl.program_id(1)
    begin = split * SPLIT
    end, to = tl.load(places + 2 * row) + 1, positions + row.to(tl.int64) * top_k
    if end <= top_k:
        if begin == 0:
            _write_all(to, end, top_k, TOP)
    elif begin < end:
        token = begin + tl.arange(0, SPLIT)
        known = token < end
        order = _ordered(tl.load(scores + row.to(tl.int64) * stride_scores + token, mask=known, other=0.0))
        last, need, upper = 0, top_k, 0
        for level in tl.static_range(LEVELS):
            upper, need = _limit(bins + (row * LEVELS + level) * BINS, need, BINS)
            last = (last << 8) | upper
        others = tl.arange(0, SPLITS)
        at = counts + (row.to(tl.int64) * 2 * tl.num_programs(0) + others) * BINS + upper
        before = others < split
        equals = tl.sum(tl.load(at, mask=before, other=0), 0)  # of programs before this one
        above = tl.sum(tl.load(at + tl.num_programs(0) * BINS, mask=before, other=0), 0)
        last = last.to(tl.uint32, bitcast=True)
        equal = (known & (order == last)).to(tl.int32)
        taken = (known & (order > last)) | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= need))
        place = above + tl.minimum(equals, need) + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(to + place, token, mask=taken)
