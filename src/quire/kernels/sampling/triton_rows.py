"""Functions that the sampling kernels of a GPU share: parameters of a slot, exact and approximate noise, packed keys.

The layout of a slot's parameters is that of rows.py; `row` points to their first word. Knows nothing of how tokens are
chosen.
"""

from __future__ import annotations

from quire.kernels.triton_runtime import jit, tl


@jit
def needs_of(row):
    """Return the bits of `Needs` of a slot. row: pointer to the slot's parameters."""
    return tl.load(row)


@jit
def temperature_of(row):
    """Return the temperature of a slot, float32 > 0. row: pointer to the slot's parameters."""
    return tl.load((row + 1).to(tl.pointer_type(tl.float32)))


@jit
def seed_of(row):
    """Return the two uint32 halves of a slot's seed, the low half first. row: pointer to the slot's parameters."""
    return tl.load(row + 4).to(tl.uint32, bitcast=True), tl.load(row + 5).to(tl.uint32, bitcast=True)


@jit
def philox(block, position, k0, k1):
    """Return the four uint32 random words of each block of four ids: Philox4x32-10 of noise.py, for the stream SAMPLE.

    block      id // 4
    position   position of the drawn token in its sequence
    k0, k1     low and high half of the seed
    """
    c0 = block.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        product_0 = c0.to(tl.uint64) * 0xD2511F53
        product_1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product_1.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@jit
def word_of(ids, position, low, high):
    """Return the random word (uint32) of each vocabulary id. low, high: halves of the seed."""
    c0, c1, c2, c3 = philox(ids // 4, position, low, high)
    at = ids % 4
    return tl.where(at < 2, tl.where(at == 0, c0, c1), tl.where(at == 2, c2, c3))


@jit
def words_of_quads(blocks, position, low, high):
    """Return the random words [Q, 4] of the four ids of each of Q blocks. low, high: halves of the seed."""
    c0, c1, c2, c3 = philox(blocks, position, low, high)
    return tl.join(tl.join(c0, c2), tl.join(c1, c3)).reshape(blocks.shape[0], 4)


@jit
def gumbel(word):
    """Convert random words to Gumbel noise, float32: as noise.py, up to the last unit of a float64 logarithm."""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -(tl.log(-tl.log(uniform)).to(tl.float32))


@jit
def _log2(value, NATIVE: tl.constexpr):
    """Return log2 of float32 values; NATIVE: by the PTX instruction lg2.approx, which the interpreter does not have."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(value)


@jit
def near_gumbel(word, NATIVE: tl.constexpr):
    """Convert random words to Gumbel noise with an error of at most 2e-5, by two single-precision logarithms.

    lg2.approx has an error of 2^-22.6 between 1/2 and 2, and of 2^-22 of its value elsewhere (PTX ISA). Above 15/16,
    where the logarithm of u is near 0, the series of log(1 - f) with f = 1 - u replaces it, up to f^5: relative error
    f^5 / 6.
    """
    upper = word >= 0xF0000000
    f = tl.where(upper, word ^ 0xFFFFFFFF, word).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    series = f * (1.0 + f * (0.5 + f * (0.3333333333333333 + f * (0.25 + f * 0.2))))
    exponential = tl.where(upper, series, -0.6931471805599453 * _log2(f, NATIVE))
    return -0.6931471805599453 * _log2(exponential, NATIVE)


@jit
def ordered(value):
    """Convert float32 numbers to int32 numbers that compare in the same order; -0.0 counts as 0.0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def packed(value, ids):
    """Pack value and id into an int64 key: the largest key has the largest value and, among equals, the lowest id."""
    return (ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@jit
def settle(key, row, tokens, codes):
    """Write the token of row number `row`, and its code as in `SamplerOperations`.

    key   the largest packed pair of (value of a token, token id); the largest int64: the row has NaN or +inf
    """
    empty = (key >> 32) == -2139095041  # ordered(-inf)
    code = tl.where(key == 0x7FFFFFFFFFFFFFFF, 1, tl.where(empty, 2, 0))
    tl.store(tokens + row, tl.where(code == 0, 0x7FFFFFFF - (key & 0x7FFFFFFF), 0))
    tl.store(codes + row, code.to(tl.uint8))


@jit
def tile_of(logits, edited, ids, mask, rewritten, EDITED: tl.constexpr):
    """Load logits of a row at `ids` as float32, from its edited copy if `rewritten`; -inf outside `mask`."""
    if EDITED:
        if rewritten:
            x = tl.load(edited + ids, mask, other=float("-inf"))
        else:
            x = tl.load(logits + ids, mask, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(logits + ids, mask, other=float("-inf")).to(tl.float32)
    return x
