"""Kernels that read a row of logits once: greedy and unfiltered draws, and the statistics of a row for the filters.

A row is cut into parts, one program each. The result does not depend on the cuts, so a row's token does not depend on
the number of rows. Plain draws (noise, no filters) first compute approximate scores. Then they compute the float64
logarithms of the noise for the best id only; for the whole part if a second id is within the error: about one part in
10^4.

Common arguments of the functions, for a row:

    logits, edited      pointers to the row's logits and to its rewritten copy, float32
    rewritten, EDITED   read the copy; False at compile time: there are no copies
    table               pointer to the slot's parameters, see rows.py
    position            position of the token that is drawn
    start, stop         ids start .. stop - 1 of the part
    NATIVE              use a PTX instruction that the interpreter does not have
"""

from __future__ import annotations

from quire.kernels.sampling.triton_rows import (
    gumbel,
    near_gumbel,
    needs_of,
    packed,
    seed_of,
    settle,
    temperature_of,
    tile_of,
    word_of,
    words_of_quads,
)
from quire.kernels.triton_runtime import jit, tl

GROUP = 64  # ids of a group: the filters know the largest logit of each group of neighbours


@jit
def _exact_key(logits, edited, rewritten, table, position, start, stop, EDITED: tl.constexpr, TILE: tl.constexpr):
    """Return the largest packed (score, id) of a part, with all noise in float64."""
    temperature = temperature_of(table)
    low, high = seed_of(table)
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    where = tl.zeros([TILE], tl.int32)
    for at in range(start, stop, TILE):
        ids = at + lane
        x = tile_of(logits, edited, ids, ids < stop, rewritten, EDITED)
        score = tl.math.div_rn(x, tl.zeros_like(x) + temperature) + gumbel(word_of(ids, position, low, high))
        better = score > best
        where = tl.where(better, ids, where)
        best = tl.where(better, score, best)
    return tl.max(packed(best, where))


@jit
def _winner_key(logits, edited, rewritten, table, position, winner, EDITED: tl.constexpr):
    """Return the packed (score, id) of the id `winner`, with noise in float64."""
    low, high = seed_of(table)
    x = tile_of(logits, edited, winner, True, rewritten, EDITED)
    score = tl.math.div_rn(x, temperature_of(table)) + gumbel(word_of(winner, position, low, high))
    return packed(score, winner)


@jit
def _part_key(
    logits,
    edited,
    rewritten,
    table,
    position,
    start,
    stop,
    EDITED: tl.constexpr,
    NOISE: tl.constexpr,
    TILE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return the largest packed (score, id) of a part; the largest int64 if a logit is NaN or +inf."""
    quads = tl.arange(0, TILE // 4)
    lane = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    best = tl.full([TILE // 4, 4], float("-inf"), tl.float32)
    second = best
    where = tl.zeros([TILE // 4, 4], tl.int32)
    peak = best
    noisy = False
    inverse = 1.0
    low = 0
    high = 0
    if NOISE:
        low, high = seed_of(table)
        noisy = (needs_of(table) & 1) != 0
        inverse = 1.0 / temperature_of(table)
    for at in range(start, stop, TILE):
        ids = at + lane
        score = tile_of(logits, edited, ids, ids < stop, rewritten, EDITED)
        peak = tl.maximum(peak, score, propagate_nan=tl.PropagateNan.ALL)
        if NOISE:
            if noisy:
                score = score * inverse + near_gumbel(words_of_quads(at // 4 + quads, position, low, high), NATIVE)
                second = tl.maximum(second, tl.minimum(score, best))
        better = score > best
        where = tl.where(better, at, where)
        best = tl.where(better, score, best)
    where += lane
    key = tl.max(packed(best, where))
    if NOISE:
        top = tl.max(best)
        if noisy & (top > float("-inf")):
            # Scores are off by 3e-5 of noise and a few roundings of logits up to |top| + 23; twice that tells two ids.
            margin = 6e-5 + (2.0 * tl.abs(top) + 25.0) * 1e-6
            near = tl.sum((best >= top - margin).to(tl.int32) + (second >= top - margin).to(tl.int32))
            if near == 1:
                winner = tl.max(tl.where(best == top, where, 0))
                key = _winner_key(logits, edited, rewritten, table, position, winner, EDITED)
            else:
                key = _exact_key(logits, edited, rewritten, table, position, start, stop, EDITED, TILE // 4)
    sound = tl.min((peak < float("inf")).to(tl.int32)) > 0
    return tl.where(sound, key, 0x7FFFFFFFFFFFFFFF)


@jit
def _store_key(key, row, tokens, codes, KEYS: tl.constexpr):
    """Store the largest key of a row, or the token and code that it means."""
    if KEYS:
        tl.store(tokens + row, key)
    else:
        settle(key, row, tokens, codes)


@jit
def settle_kernel(keys, tokens, codes):
    """Write each row's token, and its code as in `SamplerOperations`. Grid (rows,).

    keys   [R] int64: of each row, the largest packed pair of (value of a token, token id)
    """
    row = tl.program_id(0)
    settle(tl.load(keys + row), row, tokens, codes)


@jit
def pick_kernel(
    logits,
    slots,
    positions,
    table,
    partial,
    counters,
    tokens,
    codes,
    first,
    vocab,
    stride,
    part_size,
    NOISE: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Draw greedy or unfiltered tokens of rows. Grid (parts, rows). The last program of a row to end merges all parts.

    logits               [R, vocab]
    slots, positions     [R] int64, see `Rows`; not read if NOISE is False
    table                [slots, 16] int32, see `Rows`; not read if NOISE is False
    partial, counters    see `Scratch`; counters are 0 before and after
    tokens, codes        [R] int64 and uint8, outputs; with KEYS the packed keys go to `tokens`
    first                id of the first column, a multiple of 4
    vocab, stride        columns of `logits`, and elements from row to row
    part_size, PARTS     ids of a part (a multiple of TILE), and most parts of a row
    """
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    line = logits + row * stride - first
    entry = table
    position = 0
    if NOISE:
        entry = table + tl.load(slots + row).to(tl.int64) * 16
        position = tl.load(positions + row)
    start = first + part * part_size
    stop = tl.minimum(start + part_size, first + vocab)
    key = _part_key(line, line, False, entry, position, start, stop, False, NOISE, TILE, NATIVE)
    if tl.num_programs(0) == 1:
        _store_key(key, row, tokens, codes, KEYS)
    else:
        tl.store(partial + row * PARTS + part, key)
        tl.debug_barrier()
        if tl.atomic_add(counters + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            lane = tl.arange(0, PARTS)
            mine = lane < tl.num_programs(0)
            keys = tl.load(partial + row * PARTS + lane, mask=mine, other=-0x8000000000000000, cache_modifier=".cg")
            _store_key(tl.max(keys), row, tokens, codes, KEYS)
            tl.store(counters + row, 0)


@jit
def stream_kernel(
    logits,
    edited,
    slots,
    positions,
    table,
    partial,
    group_max,
    tile_mass,
    vocab,
    stride,
    part_size,
    num_groups,
    num_tiles,
    EDITED: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Compute from one reading of each row the statistics that `select_kernel` needs. Grid (parts, rows).

    For rows with filters it writes group_max: the largest logit of each GROUP ids (+inf for NaN). If top-p is the only
    filter, it also writes tile_mass: the sum of exp((logit - largest logit of these) / temperature) of each WIDE ids.
    For other rows it writes to `partial` the packed key (best score and its id) of each part.

    logits, edited                    [R, vocab] raw logits, and copies of the rows that masks or penalties change
    slots, positions, table           see `Rows`
    partial, group_max, tile_mass     see `Scratch`, outputs
    vocab, stride                     columns of `logits`, and elements from row to row
    num_groups, num_tiles             columns of group_max, and of tile_mass
    part_size, PARTS                  ids of a part (a multiple of WIDE), and most parts of a row
    """
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    entry = table + tl.load(slots + row).to(tl.int64) * 16
    needs = needs_of(entry)
    rewritten = (needs & 28) != 0
    line = logits + row * stride
    copy = edited + row * vocab
    start = part * part_size
    stop = tl.minimum(start + part_size, vocab)
    if needs & 2:
        inverse = 1.0 / temperature_of(entry)
        weighed = (tl.load(entry + 2) == 0) & (tl.load((entry + 8).to(tl.pointer_type(tl.float64))) <= 0.0)
        groups = tl.arange(0, WIDE // GROUP)
        lane = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        for at in range(start, stop, WIDE):
            ids = at + lane
            x = tile_of(line, copy, ids, ids < stop, rewritten, EDITED)
            x = tl.where(x < float("inf"), x, float("inf"))
            largest = tl.max(x, axis=1)
            group = at // GROUP + groups
            tl.store(group_max + row * num_groups + group, largest, mask=group < num_groups)
            if weighed:
                peak = tl.max(largest)
                base = tl.where(peak > float("-inf"), peak, 0.0)
                tl.store(tile_mass + row * num_tiles + at // WIDE, tl.sum(tl.exp((x - base) * inverse)))
    else:
        position = tl.load(positions + row)
        key = _part_key(line, copy, rewritten, entry, position, start, stop, EDITED, True, TILE, NATIVE)
        tl.store(partial + row * PARTS + part, key)
