"""Logits processors on a GPU: rows with masks, bias or penalties get a rewritten copy; raw logits stay unchanged.

    prepare    copies the row, -inf where the grammar mask forbids an id (everywhere if only some ids are allowed), and
               counts the history into `tally`
    edit       allowed ids (if the grammar mask allows them, too), stop ids, bad words, bias, as in edits.py. The slot's
               row holds the address of its edits, see rows.py
    penalize   penalties, once per id of the history: the lane that takes a tally sets the logit, and leaves 0 there

The low 30 bits of a tally count the id in the output; bit 30 means that the id is in the prompt. Common arguments:

    logits, edited       [R, vocab] raw logits, and float32 copies; stride  elements from row to row of logits
    tally, broken        see `Scratch`
    history              [slots, history_stride] int32 token ids by position
    slots, positions     [R] int64, see `Rows`;  table  [slots, 16] int32, see rows.py
    places, masks        [R] int32 and [., mask_words] int32, see `SamplerOperations.take_masks`
"""

from __future__ import annotations

from quire.kernels.sampling.triton_rows import needs_of
from quire.kernels.triton_runtime import jit, tl


@jit
def _mask_of(places, masks, number, words):
    """Return a pointer to the mask of row `number`, and True if it has one. masks [., words]."""
    place = tl.load(places + number)
    return masks + tl.maximum(place, 0).to(tl.int64) * words, place >= 0


@jit
def _masked(x, ids, mask, inside):
    """Return the values x [N] of `ids`, -inf for ids that the mask forbids."""
    word = tl.load(mask + (ids >> 5), mask=inside, other=0)
    return tl.where(((word >> (ids & 31)) & 1) != 0, x, float("-inf"))


@jit
def prepare_kernel(
    logits,
    edited,
    tally,
    broken,
    history,
    slots,
    positions,
    table,
    places,
    masks,
    vocab,
    stride,
    history_stride,
    mask_words,
    part_size,
    TILE: tl.constexpr,
):
    """Copy the rows that have masks, bias or penalties to `edited`, and count the tokens of their histories in `tally`.

    Sets `broken` of a row that has NaN or +inf in its raw logits. Grid (parts, rows).

    part_size   ids of a part, a multiple of TILE; for other arguments see the top of this file
    """
    part = tl.program_id(0)
    number = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + number).to(tl.int64)
    row = table + slot * 16
    needs = needs_of(row)
    lane = tl.arange(0, TILE)
    if needs & 28:
        some = False
        mask, masked = _mask_of(places, masks, number, mask_words)
        if needs & 4:
            some = tl.load(tl.load((row + 14).to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.int32))) >= 0
        start = part * part_size
        stop = tl.minimum(start + part_size, vocab)
        bad = tl.zeros([TILE], tl.int32)
        for at in range(start, stop, TILE):
            ids = at + lane
            x = tl.load(logits + number * stride + ids, mask=ids < stop, other=0.0).to(tl.float32)
            bad |= ((x < float("inf")) == 0).to(tl.int32)
            if masked & ((needs & 16) != 0):
                x = _masked(x, ids, mask, ids < stop)
            tl.store(edited + number * vocab + ids, tl.where(some, float("-inf"), x), mask=ids < stop)
        if tl.max(bad) > 0:
            tl.store(broken + number, 1)
    if needs & 8:
        position = tl.load(positions + number).to(tl.int32)
        num_prompt = tl.load(row + 3)
        for at in range(part * TILE, position, tl.num_programs(0) * TILE):
            place = at + lane
            token = tl.load(history + slot * history_stride + place, mask=place < position, other=-1)
            known = (token >= 0) & (token < vocab)
            target = tally + number * vocab + token
            tl.atomic_or(target, 0x40000000, mask=known & (place < num_prompt), sem="relaxed")
            tl.atomic_add(target, 1, mask=known & (place >= num_prompt), sem="relaxed")


@jit
def edit_kernel(
    logits,
    edited,
    history,
    slots,
    positions,
    table,
    places,
    masks,
    vocab,
    stride,
    history_stride,
    mask_words,
    TILE: tl.constexpr,
):
    """Apply allowed ids, stop ids, bad words and bias to the copy of each row in `edited`. Grid (rows,)."""
    number = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + number).to(tl.int64)
    row = table + slot * 16
    lane = tl.arange(0, TILE)
    if needs_of(row) & 4:
        words = tl.load((row + 14).to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.int32))
        num_allowed = tl.maximum(tl.load(words), 0)
        num_stops = tl.load(words + 1)
        num_biases = tl.load(words + 2)
        num_words = tl.load(words + 3)
        longest = tl.load(words + 4)
        position = tl.load(positions + number).to(tl.int32)
        copy = edited + number * vocab
        at_stops = 8 + num_allowed
        at_bias = at_stops + num_stops
        at_words = at_bias + 2 * num_biases
        mask, masked = _mask_of(places, masks, number, mask_words)
        for at in range(0, num_allowed, TILE):
            inside = at + lane < num_allowed
            token = tl.load(words + 8 + at + lane, mask=inside, other=0)
            x = tl.load(logits + number * stride + token, mask=inside, other=0.0).to(tl.float32)
            if masked & ((needs_of(row) & 16) != 0):
                x = _masked(x, token, mask, inside)
            tl.store(copy + token, x, mask=inside)
        tl.debug_barrier()
        if position < tl.load(row + 13):
            for at in range(0, num_stops, TILE):
                inside = at + lane < num_stops
                token = tl.load(words + at_stops + at + lane, mask=inside, other=0)
                tl.store(copy + token, float("-inf"), mask=inside)
        tokens = words + at_words + num_words + 1
        known = history + slot * history_stride + position
        for at in range(0, num_words, TILE):
            inside = at + lane < num_words
            begin = tl.load(words + at_words + at + lane, mask=inside, other=0)
            length = tl.load(words + at_words + at + lane + 1, mask=inside, other=0) - begin - 1
            ends = inside & (length <= position)
            for place in range(0, longest - 1):
                here = ends & (place < length)
                wanted = tl.load(tokens + begin + place, mask=here, other=0)
                ends = ends & ((wanted == tl.load(known - length + place, mask=here, other=0)) | (place >= length))
            token = tl.load(tokens + begin + length, mask=ends, other=0)
            tl.store(copy + token, float("-inf"), mask=ends)
        tl.debug_barrier()
        for at in range(0, num_biases, TILE):
            inside = at + lane < num_biases
            token = tl.load(words + at_bias + at + lane, mask=inside, other=0)
            bias = tl.load(words + at_bias + num_biases + at + lane, mask=inside, other=0).to(tl.float32, bitcast=True)
            x = tl.load(copy + token, mask=inside, other=0.0)
            tl.store(copy + token, x + bias, mask=inside)


@jit
def penalize_kernel(edited, tally, history, slots, positions, table, vocab, history_stride, TILE: tl.constexpr):
    """Apply repetition, frequency and presence penalties to the logit copies in `edited`, and reset their tallies.

    It rounds as edits.py does. Grid (programs that share a row's history, rows).
    Must be compiled without fused multiply-adds, which round differently.
    """
    number = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + number).to(tl.int64)
    row = table + slot * 16
    lane = tl.arange(0, TILE)
    if needs_of(row) & 8:
        position = tl.load(positions + number).to(tl.int32)
        numbers = row.to(tl.pointer_type(tl.float32))
        repetition = tl.load(numbers + 10)
        frequency = tl.load(numbers + 11)
        presence = tl.load(numbers + 12)
        for at in range(tl.program_id(0) * TILE, position, tl.num_programs(0) * TILE):
            place = at + lane
            token = tl.load(history + slot * history_stride + place, mask=place < position, other=-1)
            known = (token >= 0) & (token < vocab)
            taken = tl.atomic_xchg(tally + number * vocab + token, 0, mask=known, sem="relaxed")
            first = known & (taken != 0)
            count = (taken & 0x3FFFFFFF).to(tl.float32)
            x = tl.load(edited + number * vocab + token, mask=first, other=0.0)
            x = tl.where(x > 0.0, tl.math.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            x = x - count * frequency
            x = x - tl.where(count > 0.0, presence, 0.0)
            tl.store(edited + number * vocab + token, x, mask=first)
