"""Products of experts with MXFP4 weights in words, for few tokens, in Triton: each pair (token, expert) by itself.

A unit of 16 outputs has its weights for all inputs in one piece of memory, 23 KB of 2880 inputs. The warps of a program
divide the inputs of a unit. A lane reads 16 bytes at a time, which are its numbers of the left operand of tensor cores,
and many of them before the first product. The right operand has the pair's row in each of its 8 columns.

Tensor cores, although they compute each sum eight times: to widen a number to float32 and multiply it takes more
instructions than there is time for while its 4 bits arrive. As bf16, two numbers are widened at once.

_alone_up_kernel     8 outputs of gate and the same 8 of up, their activation
_alone_down_kernel   16 outputs, the weighted sum over a token's experts, and the residual

Floor on an H200: the packed bytes of each pair's expert over 4.3 TB/s. Of a token of gpt-oss-20b: 8.2 us for gate and
up, 4.1 us for down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.kernels import pdl
from quire.kernels.activation.triton import gated_of
from quire.kernels.linear.gemv import bucket
from quire.kernels.triton_runtime import INTERPRETED, jit, tl
from quire.kernels.weight_only.bits import E2M1_CODE, E2M1_IN
from quire.kernels.weight_only.words import STEP

MOST_TURNS = 6  # steps of 128 inputs of a warp of `_alone_up_kernel`: it reads the weights of all before it multiplies
MOST_DOWN_TURNS = 24  # of a warp of `_alone_down_kernel`: it reads the weights of a few ahead
MOST_WARPS = 16
READ_AHEAD = 48  # steps whose weights a program of `_alone_down_kernel` holds; with more, no other has room beside it


@dataclass(frozen=True)
class Routed:
    """The experts of tokens; see `quire.kernels.experts`.

    ids, expert_map   [T, k] int32; [all experts] int32 or None
    weights           [T, k] float32
    """

    ids: Tensor
    weights: Tensor
    expert_map: Tensor | None


@dataclass(frozen=True)
class Matrices:
    """The gate_up or down matrices of all experts.

    words, scales   int32 [E, units, ..], see `words.repack` and `words.repack_powers`
    bias            [E, outputs] by row of the matrix, or None
    inputs          inputs K of the matrix
    """

    words: Tensor
    scales: Tensor
    bias: Tensor | None
    inputs: int


def warps_of(hidden: int, inner: int, k: int) -> tuple[int, int] | None:
    """Return the warps of programs of the two kernels; None: their products are too large for these kernels.

    hidden, inner, k   inputs H of gate and up; inputs I of down; experts of a token
    """
    steps, own_steps, experts = -(-hidden // STEP), -(-inner // STEP), bucket(k)
    up = next((warps for warps in (4, 8, MOST_WARPS) if steps <= warps * MOST_TURNS), 0)
    most = max(own_steps * experts / MOST_DOWN_TURNS, experts)
    down = next((warps for warps in (8, MOST_WARPS) if most <= warps), 0)
    return (up, down) if up and down else None


def run(
    x: Tensor,
    first: Matrices,
    second: Matrices,
    act: str,
    routed: Routed,
    residual: Tensor | None,
    y: Tensor,
    join: Callable[[], bool] | None = None,
) -> None:
    """Write residual + the weighted sum of the outputs of each token's experts to y [T, H].

    x                [T, H], each row contiguous, of sizes for which `warps_of` returns warps
    first, second    the matrices of gate and up, and of down;  act  activation (`quire.kernels.activation`)
    residual, join   see `quire.kernels.experts`; contiguous
    """
    (tokens, k), hidden, inner, in_pdl = routed.ids.shape, x.shape[1], second.inputs, pdl.in_use()
    warps = warps_of(hidden, inner, k)
    assert warps, f"{hidden} x {inner} of {k} experts"
    h = x.new_empty(tokens * k, -(-inner // 16) * 16)
    _alone_up_kernel[(tokens * k, h.shape[1] // 8)](
        x,
        first.words,
        first.scales,
        first.bias,
        routed.ids,
        routed.expert_map,
        h,
        x.stride(0),
        k,
        first.words.shape[1],
        inner,
        hidden,
        warps[0],
        act,
        not INTERPRETED,
        in_pdl,
        num_warps=warps[0],
        **pdl.options(in_pdl),
    )
    in_pdl = not (join and join()) and in_pdl
    _alone_down_kernel[(tokens, -(-hidden // 16))](
        h,
        second.words,
        second.scales,
        second.bias,
        routed.ids,
        routed.expert_map,
        routed.weights,
        residual,
        y,
        k,
        bucket(k),
        second.words.shape[1],
        hidden,
        inner,
        warps[1],
        READ_AHEAD // warps[1],
        not INTERPRETED,
        in_pdl,
        num_warps=warps[1],
        **pdl.options(in_pdl),
    )


@jit
def _place(ids, expert_map, at, mask):
    """Return the place of each pair's expert on this rank; -1 for an expert of another rank."""
    place = tl.load(ids + at, mask=mask, other=-1)
    if expert_map is not None:
        place = tl.load(expert_map + place, mask=place >= 0, other=-1)
    return place


@jit
def _fetch(words, scales, first, step, there, STEPS: tl.constexpr, MASKED: tl.constexpr):
    """Start to read a step of each warp: (words of 64 inputs, of the next 64, scales of outputs g, of outputs g + 8).

    first         number of a unit's first step among those of all units, int64;  step  [W, 1], of the unit
    there         what has weights to read, like `first`; of others, words are not defined and scales are zero
    MASKED        False: all steps are there
    """
    own = words + (first + step) * 256 + tl.arange(0, 128)[None, :]
    power = scales + (first + step) * 16 + tl.arange(0, 8)[None, :]
    if MASKED:
        mask = there & (step < STEPS)
        one = tl.load(own, mask=mask, eviction_policy="evict_first")
        two = tl.load(own + 128, mask=mask, eviction_policy="evict_first")
        low, high = tl.load(power, mask=mask, other=0), tl.load(power + 8, mask=mask, other=0)
    else:
        one = tl.load(own, eviction_policy="evict_first")
        two = tl.load(own + 128, eviction_policy="evict_first")
        low, high = tl.load(power), tl.load(power + 8)
    return one, two, low, high


@jit
def _field(packed, sign: tl.constexpr, size: tl.constexpr):
    """Return the two numbers of a field of half-words, [.., 2] float32 times 2^-126; see `bits.PLACES`."""
    half = (tl.arange(0, 2) * 16)[None, None, None, :]
    packed = packed[:, :, :, None] >> half
    bits = ((packed >> sign) & 1) << 31 | ((packed >> size) & 7) << 22
    return bits.to(tl.float32, bitcast=True)


@jit
def _exponents(powers, piece: tl.constexpr):
    """Return the exponents of the scales of each lane's words, [W, 32, 4]. powers  [W, 8]: scales by output."""
    W: tl.constexpr = powers.shape[0]
    own = tl.reshape(tl.broadcast_to(powers[:, :, None], [W, 8, 4]), [W, 32])
    byte = tl.arange(0, 4) // 2 * 8 + 16 * piece  # two words have 32 inputs
    return (own[:, :, None] >> byte[None, None, :]) & 255


@jit
def _numbers(packed, low, high, piece: tl.constexpr, ASM: tl.constexpr):
    """Widen words [W, 128] to the left operand [W, 16 outputs, 64 inputs]: bf16 if ASM, else float32.

    low, high   scales of outputs g and g + 8, [W, 8], see `words.repack_powers`
    piece       0 or 1: half of the step
    """
    W: tl.constexpr = packed.shape[0]
    packed = tl.reshape(packed, [W, 32, 4])
    low = _exponents(low, piece)
    high = _exponents(high, piece)
    if ASM:
        TYPES: tl.constexpr = (
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
        )
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            E2M1_CODE, E2M1_IN, [packed, low * 0x00800080, high * 0x00800080], dtype=TYPES, is_pure=True, pack=2
        )
        # [W, 8 g, 4 t, 2 k32, 2 k1, 2 +8 outputs, 2 k8, 2 k16]
        numbers = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
        numbers = tl.permute(tl.reshape(numbers, [W, 8, 4, 2, 2, 2, 2, 2]), [0, 5, 1, 3, 7, 2, 6, 4])
    else:
        low = (low << 23).to(tl.float32, bitcast=True)[:, :, :, None]
        high = (high << 23).to(tl.float32, bitcast=True)[:, :, :, None]
        first = tl.join(_field(packed, 15, 6) * low, _field(packed, 12, 3) * high)
        after = tl.join(_field(packed, 14, 0) * low, _field(packed, 13, 9) * high)
        # [W, 8 g, 4 t, 2 k32, 2 k16, 2 k1, 2 +8 outputs, 2 k8]
        numbers = tl.reshape(tl.join(first, after), [W, 8, 4, 2, 2, 2, 2, 2])
        numbers = tl.permute(numbers, [0, 6, 1, 3, 4, 2, 7, 5])
    return tl.reshape(numbers, [W, 16, 64])


@jit
def _inputs(source, step, K: tl.constexpr, MASKED: tl.constexpr, ORDERED: tl.constexpr):
    """Start to read the inputs of a step of each warp: a tuple of eight [W, 16].

    source    pointers to the rows, a scalar or [W, 1];  step  [W, 1], behind the last where a warp has none
    MASKED    False: all inputs of the step are there
    ORDERED   True: the rows lie as `_place_of` says, with zeros up to a multiple of 16
    """
    found = ()
    for piece in tl.static_range(8):
        start = step * 128 + piece * 16
        if ORDERED:
            at = tl.arange(0, 16)[None, :]
            there = start < K
        else:
            eight = tl.arange(0, 4)[:, None, None] * 2 + tl.arange(0, 2)[None, :, None] * 8
            at = (eight + tl.arange(0, 2)[None, None, :])[None, :, :, :]
            start = start[:, :, None, None]
            there = start + at < K
        if MASKED:
            x = tl.load(source + start + at, mask=there, other=0.0)
        else:
            x = tl.load(source + start + at)
        found = found + (tl.reshape(x, [step.shape[0], 16]),)
    return found


@jit
def _multiply(acc, fetched, inputs, ASM: tl.constexpr):
    """Return acc [W, 16, 8] + the products of a step of each warp, from `_fetch` and `_inputs`."""
    one, two, low, high = fetched
    W: tl.constexpr = acc.shape[0]
    for piece in tl.static_range(8):
        if piece % 4 == 0:
            left = _quarters(_numbers(one if piece == 0 else two, low, high, piece // 4, ASM))
        x = inputs[piece]
        if not ASM:
            x = x.to(tl.float32)
        acc = tl.dot(left[piece % 4], tl.broadcast_to(x[:, :, None], [W, 16, 8]), acc, input_precision="ieee")
    return acc


@jit
def _quarters(left):
    """Cut [W, 16, 64] into a tuple of four [W, 16, 16]."""
    W: tl.constexpr = left.shape[0]
    left = tl.permute(tl.reshape(left, [W, 16, 2, 2, 16]), [0, 1, 4, 3, 2])
    one, two = tl.split(left)
    a, b = tl.split(one)
    c, d = tl.split(two)
    return a, b, c, d


@jit
def _column(acc):
    """Return the first of 8 equal columns: [W, 16, 8] -> [W, 16]."""
    return tl.sum(tl.where(tl.arange(0, 8)[None, None, :] == 0, acc, 0.0), 2)


@jit
def _place_of(number):
    """Return the place of an input in a row: those of 16 inputs that a lane multiplies lie together.

    Place 4 t + 2 j + i has input 2 t + 8 j + i.
    """
    return number // 16 * 16 + number % 8 // 2 * 4 + number % 16 // 8 * 2 + number % 2


@jit
def _alone_up_kernel(
    x,
    words,
    scales,
    bias,
    ids,
    expert_map,
    h,
    stride,
    TOP_K: tl.constexpr,
    UNITS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    ACT: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """The activation of 8 outputs of a pair, of a unit. Grid (pairs, 2 ceil(N / 16)), W warps, which divide the inputs.

    x                  [T, K];  stride  elements from token to token
    words, scales      [experts, UNITS, ..], see `Matrices`;  bias  [experts, 2 N] or None
    ids, expert_map    see `Routed`
    h                  [pairs, 16 ceil(N / 16)], output, in the order of `_place_of`, with zeros behind N. Rows of
                       pairs without an expert here are not written
    ASM                False: in Triton's interpreter, in float32
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # ids are there, so the next kernel may read weights before it waits
    pair = tl.program_id(0)
    place = _place(ids, expert_map, pair, pair >= 0)
    if place < 0:
        return
    STEPS: tl.constexpr = (K + 127) // 128
    TURNS: tl.constexpr = (STEPS + W - 1) // W
    first = (place.to(tl.int64) * UNITS + tl.program_id(1)) * STEPS
    source = x + (pair // TOP_K).to(tl.int64) * stride
    warp = tl.arange(0, W)[:, None]
    queue = ()
    for turn in tl.static_range(TURNS):
        queue = queue + (_fetch(words, scales, first, turn * W + warp, True, STEPS, (turn + 1) * W > STEPS),)
    tl.debug_barrier()  # else ptxas would read weights only where it needs them
    acc = tl.zeros([W, 16, 8], tl.float32)
    for turn in tl.static_range(TURNS):
        given = _inputs(source, turn * W + warp, K, (turn + 1) * W * 128 > K, False)
        acc = _multiply(acc, queue[turn], given, ASM)
    one, two = tl.split(tl.permute(tl.reshape(tl.sum(_column(acc), 0), [2, 8]), [1, 0]))
    col = tl.program_id(1) * 8 + tl.arange(0, 8)
    if bias is not None:
        bias += place.to(tl.int64) * (2 * N) + col
        one += tl.load(bias, mask=col < N, other=0.0).to(tl.float32)
        two += tl.load(bias + N, mask=col < N, other=0.0).to(tl.float32)
    value = gated_of(one, two, ACT)  # 0 behind N, where weights are
    tl.store(h + pair.to(tl.int64) * ((N + 15) // 16 * 16) + _place_of(col), value.to(h.dtype.element_ty))


@jit
def _alone_down_kernel(
    h,
    words,
    scales,
    bias,
    ids,
    expert_map,
    weights,
    residual,
    y,
    TOP_K: tl.constexpr,
    J: tl.constexpr,
    UNITS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    DEPTH: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """16 outputs of a token, of a unit: weighted sum over its experts of down times h. Grid (tokens, ceil(N / 16)).

    h                  [pairs, 16 ceil(K / 16)], see `_alone_up_kernel`
    words, scales      [experts, UNITS, ..], see `Matrices`;  bias  [experts, N] or None
    ids, expert_map    see `Routed`;  weights  [T, TOP_K] float32
    residual           [T, N] contiguous, added; or None;  y  [T, N] contiguous, output
    TOP_K, J           experts of a token; padded to a power of two
    W                  parts, each of one expert and of every (W / J)th step
    DEPTH              steps of each part whose weights are read ahead;  ASM  as in `_alone_up_kernel`
    """
    token = tl.program_id(0)
    STEPS: tl.constexpr = (K + 127) // 128
    SHARE: tl.constexpr = W // J
    TURNS: tl.constexpr = (STEPS + SHARE - 1) // SHARE
    part = tl.arange(0, W)[:, None]
    turn_of = part // SHARE
    pair = token * TOP_K + tl.minimum(turn_of, TOP_K - 1)
    place = _place(ids, expert_map, pair, turn_of < TOP_K)
    there = place >= 0
    weight = tl.load(weights + pair, mask=there, other=0.0)
    first = (place.to(tl.int64) * UNITS + tl.program_id(1)) * STEPS
    lead = part % SHARE
    queue = ()
    for turn in tl.static_range(DEPTH if DEPTH < TURNS else TURNS):
        queue = queue + (_fetch(words, scales, first, turn * SHARE + lead, there, STEPS, True),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = h + pair.to(tl.int64) * ((K + 15) // 16 * 16)
    upcoming = _inputs(source, lead, K, SHARE * 128 > K, True)
    acc = tl.zeros([W, 16, 8], tl.float32)
    for turn in tl.static_range(TURNS):
        given = upcoming
        if turn + 1 < TURNS:
            upcoming = _inputs(source, (turn + 1) * SHARE + lead, K, (turn + 2) * SHARE * 128 > K, True)
        if turn + DEPTH < TURNS:
            step = (turn + DEPTH) * SHARE + lead
            queue = queue + (_fetch(words, scales, first, step, there, STEPS, True),)
            tl.debug_barrier()  # as above
        acc = _multiply(acc, queue[turn], given, ASM)
    sums = _column(acc)
    col = tl.program_id(1) * 16 + tl.arange(0, 16)
    if bias is not None:  # once for each expert
        mask = there & (lead == 0) & (col < N)[None, :]
        sums += tl.load(bias + place.to(tl.int64) * N + col[None, :], mask=mask, other=0.0).to(tl.float32)
    out = tl.sum(tl.where(there, sums * weight, 0.0), 0)  # what is not there may be no number
    to = token.to(tl.int64) * N + col
    if residual is not None:
        out += tl.load(residual + to, mask=col < N, other=0.0).to(tl.float32)
    tl.store(y + to, out.to(y.dtype.element_ty), mask=col < N)
