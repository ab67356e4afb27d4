"""Draws with min-p, top-k and top-p on a GPU, without sorting, from the statistics that `stream_kernel` found.

If the largest logits of at least k groups of ids reach a value, then it is at most the k-th largest of the row. So the
groups' largest logits give a bound, and the filters keep nothing below it. Only the few groups that reach the bound are
read again. Their logits above the bound are the candidates, a list in order of ids. Three ways follow:

    at most FEW candidates     each is compared with every other: their number and probability before it. Weights are
                               exp in float64, as on the CPU; sums over equal sets differ in the last places
    at most LIST candidates    `many_kernel` finds the k-th value, and the last value that top-p keeps, by bisection of
                               the float's bits
    more, or no bound          `many_kernel` does the same over the whole row

`many_kernel` computes weights as exp in float32 and sums them in float64; its programs end at once for other rows.

Ties, and the total that top-p refers to, are as in draw.py: with min-p or top-k the sum over the ids that they keep;
else the sum over the row, rounded as the reciprocal of a float32 softmax. Results depend on the row alone. Common
arguments of the functions, for a row:

    logits, edited, rewritten, EDITED   see triton_draw.py
    temperature, top_k, top_p, min_p    parameters of the slot (least: min_p)
    scaled, peak                        logits / temperature (of groups: [GROUPS]); the largest
    mass                                sum of exp(scaled - peak) over the row
    values, ids                         candidates [LIST];  listed  read them, else the whole row;  count  of either
    floor, key                          `ordered` values: ids below `floor` are dropped by top-k
"""

from __future__ import annotations

from quire.kernels.sampling.triton_rows import (
    gumbel,
    needs_of,
    ordered,
    packed,
    seed_of,
    settle,
    temperature_of,
    tile_of,
    word_of,
)
from quire.kernels.triton_runtime import jit, tl


@jit
def _scaled(x, temperature):
    return tl.math.div_rn(x, tl.zeros_like(x) + temperature)


@jit
def _reached(scaled, weight, value):
    return tl.sum(tl.where(scaled >= value, weight, 0.0))


@jit
def _group_bound(scaled, peak, by_count, target):
    """Return a value such that the groups that reach it weigh at least `target`; -inf if all groups together do not.

    A group weighs 1 (by_count), or exp(largest - peak). The value is not the largest possible one, but within 1/16 or
    1/64 of its distance from the peak, which gives few more candidates.
    """
    weight = tl.where(by_count, 1.0, tl.exp(scaled - peak))
    weight = tl.where(scaled > float("-inf"), weight, 0.0)
    bound = float("-inf")
    if tl.sum(weight) >= target:
        distance = 16.0
        while (_reached(scaled, weight, peak - distance) < target) & (distance < 1e30):
            distance *= 8.0
        low = peak - distance
        high = peak
        steps = 0
        while (high - low > 0.0625 + (peak - low) * 0.015625) & (steps < 24):
            middle = low + (high - low) * 0.5
            if _reached(scaled, weight, middle) >= target:
                low = middle
            else:
                high = middle
            steps += 1
        bound = low
    return bound


@jit
def _bound(scaled, peak, top_k, top_p, min_p, mass, vocab):
    """Return a scaled logit below which the filters keep nothing, from the groups' largest; -inf if none is known."""
    bound = float("-inf")
    if top_k > 0:
        bound = _group_bound(scaled, peak, True, top_k.to(tl.float32))
    elif min_p <= 0.0:
        # Ids that weigh less than (1 - p) * mass / vocab are together less than what top-p may leave out.
        distance = -tl.log(((1.0 - top_p) * mass / vocab).to(tl.float32))
        bound = _group_bound(scaled, peak, False, (top_p * mass).to(tl.float32) * 1.00001)
        bound = tl.maximum(bound, peak - distance - 0.01 - tl.abs(peak) * 1e-6)
    if min_p > 0.0:
        below = peak + tl.log(min_p.to(tl.float32)) - 0.01 - tl.abs(peak) * 1e-6
        bound = tl.maximum(bound, below)
    return bound


@jit
def _gather(
    logits,
    edited,
    rewritten,
    temperature,
    scaled,
    bound,
    peak,
    group_list,
    values,
    ids,
    vocab,
    num_groups,
    EDITED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the candidates of a row in order of ids; return (their number, their weight). Stops after LIST of them.

    bound   `_bound`;  group_list  [GROUPS] int32 scratch;  num_groups  groups of the row
    """
    group = tl.arange(0, GROUPS)
    chosen = ((scaled >= bound) & (scaled > float("-inf")) & (group < num_groups)).to(tl.int32)
    tl.store(group_list + tl.cumsum(chosen, axis=0) - 1, group, mask=chosen > 0)
    count = tl.sum(chosen) * GROUP
    tl.debug_barrier()
    lane = tl.arange(0, TILE)
    found = 0
    weight = tl.zeros([TILE], tl.float64)
    at = 0
    while (at < count) & (found <= LIST):
        place = at + lane
        token = tl.load(group_list + place // GROUP, mask=place < count, other=0) * GROUP + place % GROUP
        inside = (place < count) & (token < vocab)
        value = _scaled(tile_of(logits, edited, token, inside, rewritten, EDITED), temperature)
        taken = inside & (value >= bound) & (value > float("-inf"))
        seat = found + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(values + seat, value, mask=taken & (seat < LIST))
        tl.store(ids + seat, token, mask=taken & (seat < LIST))
        weight += tl.where(taken, tl.exp((value - peak).to(tl.float64)), 0.0)
        found += tl.sum(taken.to(tl.int32))
        at += TILE
    tl.debug_barrier()
    return found, tl.sum(weight)


@jit
def _key_of_few(values, ids, before, count, peak, top_k, top_p, min_p, mass, position, low, high, LANES: tl.constexpr):
    """Return the largest packed (score, id) of a short list of candidates, noise included.

    before      [FEW] float64 scratch: probability before each candidate, inf if dropped
    low, high   halves of the seed
    """
    lane = tl.arange(0, LANES)
    column = tl.arange(0, 16)
    total = tl.zeros([LANES], tl.float64)
    for at in range(0, count, LANES):
        own = at + lane
        value = tl.load(values + own, mask=own < count, other=float("-inf"))
        larger = tl.zeros([LANES, 16], tl.int32)
        ahead = tl.zeros([LANES, 16], tl.float64)
        for start in range(0, count, 16):
            other = start + column
            rival = tl.load(values + other, mask=other < count, other=float("-inf"))
            weight = tl.exp((rival - peak).to(tl.float64))
            above = rival[None, :] > value[:, None]
            tied = (rival[None, :] == value[:, None]) & (other[None, :] < own[:, None])
            larger += above.to(tl.int32)
            ahead += tl.where(above | tied, weight[None, :], 0.0)
        weight = tl.exp((value - peak).to(tl.float64))
        left = (own < count) & ((top_k == 0) | (tl.sum(larger, axis=1) < top_k)) & (weight >= min_p)
        total += tl.where(left, weight, 0.0)
        tl.store(before + own, tl.where(left, tl.sum(ahead, axis=1), float("inf")), mask=own < count)
    tl.debug_barrier()
    total = tl.where((top_k > 0) | (min_p > 0.0), tl.sum(total), mass)
    limit = tl.where(top_p >= 1.0, float("inf"), top_p * total)
    best = tl.full([LANES], -0x8000000000000000, tl.int64)
    for at in range(0, count, LANES):
        own = at + lane
        kept = tl.load(before + own, mask=own < count, other=float("inf")) < limit
        value = tl.load(values + own, mask=kept, other=float("-inf"))
        token = tl.load(ids + own, mask=kept, other=0)
        score = packed(value + gumbel(word_of(token, position, low, high)), token)
        best = tl.maximum(best, tl.where(kept, score, -0x8000000000000000))
    return tl.max(best)


@jit
def _value_at(logits, edited, rewritten, temperature, values, listed, at, mask, EDITED: tl.constexpr):
    """Return scaled logits by place in the list if `listed`, else by id in the row."""
    if listed:
        value = tl.load(values + at, mask=mask, other=float("-inf"))
    else:
        value = _scaled(tile_of(logits, edited, at, mask, rewritten, EDITED), temperature)
    return value


@jit
def _above(
    logits,
    edited,
    rewritten,
    temperature,
    values,
    listed,
    count,
    peak,
    key,
    floor,
    least,
    EDITED: tl.constexpr,
    TILE: tl.constexpr,
    MASS: tl.constexpr,
):
    """Return the number of values above `key` and >= `floor`; with MASS the weight of those that weigh >= `least`."""
    lane = tl.arange(0, TILE)
    result = tl.zeros([TILE], tl.float64)
    for at in range(0, count, TILE):
        place = at + lane
        value = _value_at(logits, edited, rewritten, temperature, values, listed, place, place < count, EDITED)
        counted = (ordered(value) > key) & (ordered(value) >= floor) & (value > float("-inf"))
        if MASS:
            weight = tl.exp(value - peak).to(tl.float64)
            result += tl.where(counted & (weight >= least), weight, 0.0)
        else:
            result += tl.where(counted, 1.0, 0.0).to(tl.float64)
    return tl.sum(result)


@jit
def _smallest(
    logits,
    edited,
    rewritten,
    temperature,
    values,
    listed,
    count,
    peak,
    floor,
    least,
    limit,
    EDITED: tl.constexpr,
    TILE: tl.constexpr,
    MASS: tl.constexpr,
):
    """Return the smallest key (`ordered` value) above which `_above` is less than `limit` > 0."""
    low = ordered(tl.zeros_like(peak) + float("-inf")).to(tl.int64)
    high = ordered(peak).to(tl.int64)
    middle = ordered(peak - 32.0).to(tl.int64)
    while low < high:
        found = _above(
            logits,
            edited,
            rewritten,
            temperature,
            values,
            listed,
            count,
            peak,
            middle,
            floor,
            least,
            EDITED,
            TILE,
            MASS,
        )
        if found < limit:
            high = middle
        else:
            low = middle + 1
        middle = low + ((high - low) >> 1)
    return high


@jit
def _filtered_key(
    logits,
    edited,
    rewritten,
    group_max,
    tile_mass,
    group_list,
    values,
    ids,
    before,
    pending,
    masses,
    peaks,
    row,
    position,
    vocab,
    num_groups,
    num_tiles,
    EDITED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDE: tl.constexpr,
    TILES: tl.constexpr,
    FEW: tl.constexpr,
    LIST: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the largest packed (score, id) of a row with filters, or leave the row to `many_kernel`.

    In the second case `pending` gets the length of its list (-1: no list), `masses` and `peaks` get mass and peak.
    Arguments: pointers to the row's entries of `Scratch`; row: pointer to the slot's parameters.
    """
    temperature = temperature_of(row)
    low, high = seed_of(row)
    top_k = tl.load(row + 2)
    top_p = tl.load((row + 6).to(tl.pointer_type(tl.float64)))
    min_p = tl.load((row + 8).to(tl.pointer_type(tl.float64)))
    group = tl.arange(0, GROUPS)
    largest = tl.load(group_max + group, mask=group < num_groups, other=float("-inf"))
    top = tl.max(largest)
    key = tl.where(top == float("inf"), 0x7FFFFFFFFFFFFFFF, packed(top, top_k * 0))
    if (top < float("inf")) & (top > float("-inf")):
        scaled = _scaled(largest, temperature)
        peak = tl.max(scaled)
        alone = (top_k == 0) & (min_p <= 0.0)
        mass = (peak * 0.0).to(tl.float64)
        if alone:
            tiles = tl.arange(0, TILES)
            part = tl.load(tile_mass + tiles, mask=tiles < num_tiles, other=0.0)
            tile_top = tl.max(tl.reshape(largest, TILES, WIDE // GROUP), axis=1)
            part = tl.where(tile_top > float("-inf"), part, 0.0)
            sums = part.to(tl.float64) * tl.exp((_scaled(tile_top, temperature) - peak).to(tl.float64))
            share = tl.math.div_rn(1.0, tl.sum(sums).to(tl.float32))  # what a float32 softmax says of the largest
            mass = 1.0 / share.to(tl.float64)
        bound = _bound(scaled, peak, top_k, top_p, min_p, mass, vocab)
        count, weight = _gather(
            logits,
            edited,
            rewritten,
            temperature,
            scaled,
            bound,
            peak,
            group_list,
            values,
            ids,
            vocab,
            num_groups,
            EDITED,
            GROUP,
            GROUPS,
            LIST,
            TILE,
        )
        complete = (alone == 0) | (weight >= top_p * mass) | (bound == float("-inf"))
        if complete & (count <= FEW):
            key = _key_of_few(values, ids, before, count, peak, top_k, top_p, min_p, mass, position, low, high, LANES)
        else:
            tl.store(pending, tl.where(complete & (count <= LIST), count, -1))
            tl.store(masses, mass)
            tl.store(peaks, peak)
    return key


@jit
def select_kernel(
    logits,
    edited,
    broken,
    slots,
    positions,
    table,
    partial,
    group_max,
    tile_mass,
    group_list,
    values,
    ids,
    before,
    pending,
    masses,
    peaks,
    tokens,
    codes,
    vocab,
    stride,
    num_groups,
    num_tiles,
    part_size,
    EDITED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDE: tl.constexpr,
    TILES: tl.constexpr,
    FEW: tl.constexpr,
    LIST: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Draw the tokens of all rows and write tokens and codes; a few rows are left to `many_kernel`. Grid (rows,).

    logits, edited                   [R, vocab] raw logits, and copies of the rows that masks or penalties change
    EDITED                           True: some rows may have such a copy
    vocab, stride                    columns of `logits`, and elements from row to row
    broken                           [R] int32, see `Scratch`; 0 afterwards
    slots, positions, table          see `Rows`
    partial, group_max, tile_mass    see `Scratch`, written by `stream_kernel`
    group_list, values, ids, before, pending, masses, peaks   see `Scratch`, outputs
    tokens, codes                    [R] int64 and uint8, outputs
    num_groups, GROUPS               groups of a row, and columns of group_list
    num_tiles, TILES                 columns of tile_mass, and the same padded to a power of two
    part_size, PARTS                 ids of a part of `stream_kernel`, and most parts of a row
    GROUP, WIDE, FEW, LIST           sizes, see the top of this file and of triton.py
    LANES, TILE                      candidates compared at a time, and ids read at a time
    """
    number = tl.program_id(0).to(tl.int64)
    row = table + tl.load(slots + number).to(tl.int64) * 16
    needs = needs_of(row)
    tl.store(pending + number, 0)
    if needs & 2:
        key = _filtered_key(
            logits + number * stride,
            edited + number * vocab,
            (needs & 28) != 0,
            group_max + number * num_groups,
            tile_mass + number * num_tiles,
            group_list + number * GROUPS,
            values + number * LIST,
            ids + number * LIST,
            before + number * FEW,
            pending + number,
            masses + number,
            peaks + number,
            row,
            tl.load(positions + number),
            vocab,
            num_groups,
            num_tiles,
            EDITED,
            GROUP,
            GROUPS,
            WIDE,
            TILES,
            FEW,
            LIST,
            LANES,
            TILE,
        )
    else:
        lane = tl.arange(0, PARTS)
        mine = lane * part_size < vocab
        key = tl.max(tl.load(partial + number * PARTS + lane, mask=mine, other=-0x8000000000000000))
    if EDITED:
        if tl.load(broken + number) != 0:
            key = tl.zeros_like(key) + 0x7FFFFFFFFFFFFFFF
            tl.store(broken + number, 0)
            tl.store(pending + number, 0)
    settle(key, number, tokens, codes)


@jit
def _last_kept(
    logits,
    edited,
    rewritten,
    temperature,
    values,
    listed,
    count,
    peak,
    floor,
    least,
    limit,
    EDITED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the lowest key that top-p keeps, and the number of its equals that are kept. limit: top_p * total."""
    last = _smallest(
        logits, edited, rewritten, temperature, values, listed, count, peak, floor, least, limit, EDITED, TILE, True
    )
    ahead = _above(
        logits, edited, rewritten, temperature, values, listed, count, peak, last, floor, least, EDITED, TILE, True
    )
    bits = last.to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    weight = tl.exp(value - peak).to(tl.float64)
    ties = tl.minimum((limit - ahead) / weight, 2e9).to(tl.int32)  # how many j >= 0 have ahead + j * weight < limit
    ties = tl.where(ahead + ties.to(tl.float64) * weight < limit, ties + 1, ties)
    return last, tl.where(ahead + (ties - 1).to(tl.float64) * weight < limit, ties, ties - 1)


@jit
def many_kernel(
    logits,
    edited,
    slots,
    positions,
    table,
    pending,
    masses,
    peaks,
    values,
    ids,
    tokens,
    codes,
    vocab,
    stride,
    EDITED: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
    NOISE_TILE: tl.constexpr,
):
    """Draw tokens of the rows that `select_kernel` has left. Grid (rows,).

    It bisects the list of candidates in `values` and `ids`, or the whole row. Arguments are as in `select_kernel`.
    TILE and NOISE_TILE: ids that are read at a time, in the bisection and in the draw.
    """
    number = tl.program_id(0).to(tl.int64)
    count = tl.load(pending + number)
    if count != 0:
        row = table + tl.load(slots + number).to(tl.int64) * 16
        rewritten = (needs_of(row) & 28) != 0
        logits += number * stride
        edited += number * vocab
        values += number * LIST
        ids += number * LIST
        listed = count > 0
        count = tl.where(listed, count, vocab)
        peak = tl.load(peaks + number)
        temperature = temperature_of(row)
        top_k = tl.load(row + 2)
        top_p = tl.load((row + 6).to(tl.pointer_type(tl.float64)))
        least = tl.load((row + 8).to(tl.pointer_type(tl.float64)))
        floor = ordered(tl.zeros_like(peak) + float("-inf")).to(tl.int64)
        if top_k > 0:
            floor = _smallest(
                logits,
                edited,
                rewritten,
                temperature,
                values,
                listed,
                count,
                peak,
                floor,
                least,
                top_k.to(tl.float64),
                EDITED,
                TILE,
                False,
            )
        last = floor
        ties = top_k * 0 + 0x7FFFFFFF
        if top_p < 1.0:
            total = tl.load(masses + number)
            if (top_k > 0) | (least > 0.0):
                total = _above(
                    logits,
                    edited,
                    rewritten,
                    temperature,
                    values,
                    listed,
                    count,
                    peak,
                    floor - 1,
                    floor,
                    least,
                    EDITED,
                    TILE,
                    True,
                )
            last, ties = _last_kept(
                logits,
                edited,
                rewritten,
                temperature,
                values,
                listed,
                count,
                peak,
                floor,
                least,
                top_p * total,
                EDITED,
                TILE,
            )
        position = tl.load(positions + number)
        low, high = seed_of(row)
        lane = tl.arange(0, NOISE_TILE)
        seen = 0
        best = tl.full([NOISE_TILE], -0x8000000000000000, tl.int64)
        for at in range(0, count, NOISE_TILE):
            place = at + lane
            value = _value_at(logits, edited, rewritten, temperature, values, listed, place, place < count, EDITED)
            key = ordered(value)
            kept = (value > float("-inf")) & (key >= floor) & (tl.exp(value - peak).to(tl.float64) >= least)
            tied = (kept & (key == last)).to(tl.int32)
            kept = kept & ((key > last) | ((tied > 0) & (seen + tl.cumsum(tied, axis=0) <= ties)))
            seen += tl.sum(tied)
            if tl.max(kept.to(tl.int32)) > 0:
                token = place
                if listed:
                    token = tl.load(ids + place, mask=kept, other=0)
                score = packed(value + gumbel(word_of(token, position, low, high)), token)
                best = tl.maximum(best, tl.where(kept, score, -0x8000000000000000))
        settle(tl.max(best), number, tokens, codes)
