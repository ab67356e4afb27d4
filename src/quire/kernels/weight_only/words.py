"""Products with weights of 4 and 8 bits in words of 32 bits, on Hopper (compute capability 9.0), in Gluon.

A weight lies in units of 16 outputs x 64 inputs (8 bits: 32): 32 lanes x 4 words of 32 bits. A lane's 16 bytes are, in
this order, the numbers that the lane of a warp holds of a tensor core's left operand, so that they are read as they
are, converted in registers and multiplied. Floor: see `tiles`.

_few_kernel    up to MOST_FEW rows. The warps of a program take parts of K, and read their weights into registers
               before the kernel that writes x has ended.
_some_kernel   up to MOST_ROWS rows. The copy engine (TMA) reads weights and x into a ring in shared memory. Parts of K
               go to several programs; the last of them adds up the sums in order.
_unpack_kernel the weight in 16 bits, for products of more rows; in Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention.hopper import describe
from quire.kernels.linear.epilogue import Epilogue, finish_in_gluon
from quire.kernels.linear.gemv import bucket
from quire.kernels.triton_runtime import gl, gluon_jit, hopper, jit, tl
from quire.kernels.weight_only.bits import PLACES, _numbers, _twice, _zero
from quire.kernels.weight_only.tiles import small

if hopper is not None:
    mbarrier, mma_v2, tma = hopper.mbarrier, hopper.mma_v2, hopper.tma
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait

MOST_FEW, MOST_ROWS = 8, 256
STEP = 128  # inputs of a step


@dataclass(frozen=True)
class Few:
    """The tiling of `_few_kernel`.

    tall    number of units (16 outputs each) that a program computes
    warps   warps of a program; each multiplies a part of K
    depth   number of steps (STEP = 128 inputs each) whose weights a warp loads ahead
    """

    tall: int
    warps: int
    depth: int


@dataclass(frozen=True)
class Some:
    """The tiling of `_some_kernel`.

    tall     blocks of 64 outputs that a program computes; it divides the number of blocks of the weight
    rows     rows of x that a program computes: 16 to 128; up to 256 with `first`
    stages   steps (STEP = 128 inputs each) that the ring of buffers in shared memory holds
    split    parts of K that programs multiply side by side
    first    True: weights are scaled before the product, in bf16. False: the sum of each group is scaled after the
             product, in float32. Weights in groups of no multiple of 64 are scaled before the product in any case
    """

    tall: int
    rows: int
    stages: int
    split: int = 1
    first: bool = False


def repack(values: Tensor, bits: int, gated: bool = False, e2m1: bool = False) -> Tensor:
    """Return a weight packed in units of 16 outputs x 64 inputs (8-bit numbers: 32 inputs).

    The result is int32 [N / 16, K / 64 (8 bits: K / 32), 32, 4]. N and K are padded with zeros.

    values   uint8 [N, K] (8 bits) or [N, K / 2] (4 bits), unsigned; of 4 bits, the even input is in the low half
    gated    True: `values` has the rows of gate, then those of up. A unit gets 8 rows of gate and the same 8 of up
    e2m1     True: values of 4 bits are E2M1, whose bits lie as `bits.PLACES` says
    """
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), 2).flatten(1)
    values = units(values, gated)
    pad = -values.shape[1] % STEP
    if pad:
        values = torch.nn.functional.pad(values, (0, pad))
    return torch.cat([_words(part, bits, e2m1) for part in values.split(4096)])  # each number has 4 bytes for a while


def _words(values: Tensor, bits: int, e2m1: bool) -> Tensor:
    """Return the units of values [N, K], one a byte, N a multiple of 16 and K of STEP, in the order of units."""
    tiles = values.view(-1, 2, 8, values.shape[1] // 16, 2, 4, 2)  # tile, +8 outputs, g, k16, +8 inputs, t, +1 input
    tiles = tiles.permute(0, 3, 2, 5, 6, 4, 1).to(torch.int32)  # tile, k16, g, t, +1, +8 inputs, +8 outputs
    if bits == 4:
        fields = tiles.flatten(4)
        if e2m1:
            places = torch.tensor(PLACES * 2, dtype=torch.int32, device=tiles.device)
            places[4:] += 16
            words = ((fields >> 3 << places[:, 0]) + ((fields & 7) << places[:, 1])).sum(4, dtype=torch.int32)
        else:
            shifts = torch.arange(8, dtype=torch.int32, device=tiles.device) * 4
            words = (fields << shifts).sum(4, dtype=torch.int32)  # tile, k16, g, t
        words = words.view(len(words), -1, 4, 32).transpose(2, 3)
    else:
        shifts = torch.arange(4, dtype=torch.int32, device=tiles.device) * 8
        tiles = tiles.permute(0, 1, 2, 3, 5, 6, 4).flatten(5)  # .., +8 inputs, (+8 outputs, +1)
        words = (tiles << shifts).sum(5, dtype=torch.int32)  # tile, k16, g, t, +8 inputs
        words = words.view(len(words), -1, 2, 32, 2).transpose(2, 3).flatten(3)
    return words.contiguous()


def units(rows: Tensor, gated: bool) -> Tensor:
    """Return `rows` [N, ..] of a weight in the order in which `repack` packs them. N is padded to a multiple of 64.

    gated   True: `rows` has the rows of gate, then those of up. In the result, 8 of gate and the same 8 of up alternate
    """
    if gated:
        pad = -(len(rows) // 2) % 32
        halves = rows.unflatten(0, (2, -1))
        if pad:
            halves = torch.cat((halves, halves.new_zeros(2, pad, *rows.shape[1:])), 1)
        return halves.unflatten(1, (-1, 8)).transpose(0, 1).flatten(0, 2)
    pad = -len(rows) % 64
    return torch.cat((rows, rows.new_zeros(pad, *rows.shape[1:]))) if pad else rows


def repack_scales(scales: Tensor, gated: bool = False) -> Tensor:
    """Return scales or zero points [N, groups] as [N / 16, groups, 16], in the order in which `repack` packs rows."""
    return units(scales, gated).unflatten(0, (-1, 16)).transpose(1, 2).contiguous()


def repack_powers(scales: Tensor, gated: bool = False) -> Tensor:
    """Return scales in E8M0, uint8 [N, K / 32], as int32 [N / 16, ceil(K / 128), 16], in the order of packed rows.

    A word has the four scales of an output in a step, as exponents of 2^126 times the scale in bf16. The largest scale
    is 2, which `pack.convert` checks: bf16 holds no more.
    """
    exponents = (scales.to(torch.int32) + 126).clamp(max=254).to(torch.uint8)
    exponents = torch.nn.functional.pad(exponents, (0, -scales.shape[1] % 4))
    return repack_scales(exponents.contiguous().view(torch.int32), gated)


def product(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    into: Epilogue,
    *,
    bits: int,
    group: int,
    counters: Tensor,
) -> Tensor:
    """Multiply x [T, K] bf16 of at most MOST_ROWS rows with a weight of N outputs; return `into.y`.

    words      the weight, packed by `repack`
    scales     float32 scales, packed by `repack_scales`; or of weights in E2M1 by `repack_powers`
    zeros      uint8 zero points, packed by `repack_scales`; None: all are 8 (4 bits) or 128 (8 bits)
    group      inputs that share a scale, a multiple of 32
    counters   int32 zeros, one for every 64 outputs of a tile of rows. Products that run at the same time need
               different counters
    """
    (y, bias, act, residual), gated = into, into.gated
    rows, n, k = x.shape[0], y.shape[1], x.shape[1]
    walk = walk_of(rows, n, k, group, bits, gated)
    in_pdl = pdl.in_use()
    outputs = n << gated
    if isinstance(walk, Few):
        _few_kernel[(-(-outputs // (16 * walk.tall)),)](
            x,
            words,
            scales,
            zeros,
            bias,
            residual,
            y,
            rows,
            n,
            x.stride(0),
            k,
            group,
            8,
            walk.tall,
            walk.warps,
            walk.depth,
            bits,
            act,
            in_pdl,
            num_warps=walk.warps,
            **pdl.options(in_pdl),
        )
        return y
    wide, high = -(-outputs // (64 * walk.tall)), -(-rows // walk.rows)
    parts = None
    if walk.split > 1:
        parts = x.new_empty(wide * high * walk.split * 64 * walk.tall * walk.rows, dtype=torch.float32)
    _some_kernel[(wide, walk.split, high)](
        describe(x, [walk.rows, STEP]),
        describe(words.view(len(words), -1, 32), [4 * walk.tall, 2 * bits, 32]),
        scales,
        zeros,
        bias,
        residual,
        y,
        parts,
        counters,
        rows,
        n,
        k,
        group,
        walk.rows,
        walk.tall,
        bits,
        act,
        walk.first or group % 64 > 0,
        walk.stages,
        in_pdl,
        num_warps=4,
        **pdl.options(in_pdl),
    )
    return y


def walk_of(rows: int, n: int, k: int, group: int, bits: int, gated: bool) -> Few | Some:
    """Return the tiling for `rows` rows of x, n outputs and k inputs. gated: n outputs of gate and n of up.

    The rules follow the best tilings of the products of Qwen3 8B on an H200, which has 132 multiprocessors.
    """
    steps, outputs = -(-k // STEP), n << gated
    fine = group % 128 > 0  # a step has several scales
    if rows <= MOST_FEW:
        tall = 1 if 132 < -(-outputs // 32) < 264 or fine and steps > 128 else 2
        warps = min(16 if steps > 128 else 4 if outputs >= 16384 else 8, 1 << steps.bit_length() - 1)
        depth = 1 if fine and (steps > 128 or bits * tall == 16) else 2 if fine or bits == 8 else 4
        return Few(tall, warps, min(-(-steps // warps), depth))
    size, blocks = min(128, max(16, bucket(rows))), -(-outputs // 64)
    tall = 2 if size <= 32 and blocks >= 256 and blocks % 2 == 0 else 1
    high = -(-rows // size)
    programs = {16: 768, 32: 512, 64: 256, 128: 264}[size]
    split = max(1, min(steps * 4 // size, programs // (blocks * high)))
    stage = tall * STEP * 8 * bits + size * STEP * 2  # bytes
    together = max(1, -(-blocks * high * split // (132 * tall)))  # programs of a multiprocessor
    stages = min(6, max(3, (227 << 10) // together // stage))
    return Some(tall, size, stages, split, size == 128 and fine)


def unpack(
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    bits: int,
    group: int,
    gated: bool,
) -> Tensor:
    """Return the weight [N, K] in `dtype`; `shape` is (N, K). Rows of gate come before those of up.

    Other arguments as in `product`.
    """
    n, k = shape
    weight = torch.empty(shape, dtype=dtype, device=words.device)
    in_pdl = pdl.in_use()
    _unpack_kernel[(-(-k // STEP), len(words) // 4)](
        words, scales, zeros, weight, n >> gated, k, group, bits, gated, in_pdl, num_warps=8, **pdl.options(in_pdl)
    )
    return weight


@gluon_jit
def _finish(acc, bias, residual, y, first, first_row, rows, n, ACT: gl.constexpr, OUT: gl.constexpr):
    """Apply bias, activation and residual to sums [outputs of units, M], and store them.

    first, first_row   the first output (of gate, if GATED) and row;  OUT  layout of the results
    """
    HEIGHT: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    other = acc
    if ACT != "":
        acc, other = gl.split(acc.reshape([HEIGHT // 16, 2, 8, M]).permute([0, 2, 3, 1]).reshape([HEIGHT // 2, M, 2]))
        other = gl.convert_layout(other, OUT)
    out = gl.convert_layout(acc, OUT)
    col = first + gl.arange(0, out.shape[0], gl.SliceLayout(1, OUT))
    row = first_row + gl.arange(0, M, gl.SliceLayout(0, OUT))
    finish_in_gluon(out, other, bias, residual, y, row.to(gl.int64), col, rows, n, ACT)


@gluon_jit
def _pieces(numbers, DEEP: gl.constexpr):
    """Cut numbers [A, B, 16, inputs] into a tuple of pieces of at most DEEP inputs."""
    A: gl.constexpr = numbers.shape[0]
    B: gl.constexpr = numbers.shape[1]
    if numbers.shape[3] <= DEEP:
        return (numbers,)
    else:
        return gl.split(numbers.reshape([A, B, 16, 2, DEEP]).permute([0, 1, 2, 4, 3]))


@gluon_jit
def _fetch(
    words,
    scales,
    zeros,
    tile,
    turn: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    TALL: gl.constexpr,
    WARPS: gl.constexpr,
    BITS: gl.constexpr,
    DEEP: gl.constexpr,
    ACC: gl.constexpr,
):
    """Start to read a step of each warp: return tuples of words by unit, of scales and of zeros by group.

    DEEP, ACC   inputs of a step that share a scale; layout of sums
    """
    L: gl.constexpr = gl.BlockedLayout([1, TALL, 1, 4], [1, 1, 32, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    STEPS: gl.constexpr = (K + 127) // 128
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    UNITS: gl.constexpr = 2 if BITS == 4 else 4  # of a step
    part = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    tall = gl.arange(0, TALL, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    EVEN: gl.constexpr = STEPS % WARPS == 0
    step = turn * WARPS + part
    if not EVEN:
        step = gl.minimum(step, STEPS - 1)  # read again; x is 0 there
    tall += tile * TALL
    at = (tall * STEPS + step).to(gl.int64) * (UNITS * 128) + lane * 4 + word
    packed = ()
    for unit in gl.static_range(UNITS):
        packed = packed + (gl.load(words + at + unit * 128, eviction_policy="evict_first"),)
    row = gl.arange(0, 16 * TALL, gl.SliceLayout(0, gl.SliceLayout(2, ACC)))[None, :]
    beside = turn * WARPS + gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, ACC)))[:, None]
    if not EVEN:
        beside = gl.minimum(beside, STEPS - 1)
    own_scales = ()
    own_zeros = ()
    if scales.dtype.element_ty == gl.int32:
        own = (tall * STEPS + step) * 16 + lane // 4
        own_scales = (gl.load(scales + own), gl.load(scales + own + 8))
    else:
        for piece in gl.static_range(128 // DEEP):
            group = gl.minimum((beside * 128 + piece * DEEP) // GROUP, GROUPS - 1)
            own_scales = own_scales + (gl.load(scales + ((tile * TALL + row // 16) * GROUPS + group) * 16 + row % 16),)
            group = gl.minimum((step * 128 + piece * DEEP) // GROUP, GROUPS - 1)
            own = (tall * GROUPS + group) * 16 + lane // 4
            own_zeros = own_zeros + ((_zero(zeros, own, BITS), _zero(zeros, own + 8, BITS)),)
    return packed, own_scales, own_zeros


@gluon_jit
def _given(
    x,
    turn: gl.constexpr,
    rows,
    stride,
    K: gl.constexpr,
    M: gl.constexpr,
    WARPS: gl.constexpr,
    SIZE: gl.constexpr,
    ACC: gl.constexpr,
):
    """Start to read the inputs of a step of each warp, [WARPS, SIZE, M] each: return a tuple."""
    L: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    part = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    deep = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    row = gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    at = (turn * WARPS + part) * 128 + deep
    source = x + gl.minimum(row, rows - 1).to(gl.int64) * stride + at
    found = ()
    for piece in gl.static_range(128 // SIZE):
        if K % (128 * WARPS) == 0:
            found = found + (gl.load(source + piece * SIZE),)
        else:
            found = found + (gl.load(source + piece * SIZE, mask=(at + piece * SIZE < K) & (row < M), other=0.0),)
    return found


@gluon_jit(do_not_specialize=["rows"])
def _few_kernel(
    x,
    words,
    scales,
    zeros,
    bias,
    residual,
    y,
    rows,
    n,
    stride,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    M: gl.constexpr,
    TALL: gl.constexpr,
    WARPS: gl.constexpr,
    DEPTH: gl.constexpr,
    BITS: gl.constexpr,
    ACT: gl.constexpr,
    PDL: gl.constexpr,
):
    """16 TALL outputs of units, of up to M rows. Grid (ceil(outputs / (16 TALL)),), WARPS warps.

    x                  [rows, K] bf16;  stride  elements from row to row
    words              [.., ceil(K / 128) * 128 / 64 (8 bits: / 32), 32, 4] int32, see `repack`
    scales, zeros      [.., K / GROUP, 16] float32, uint8 or None, see `repack_scales`. Of E2M1 see `repack_powers`
    bias, residual, y  as in `gemv._few_kernel`;  n  outputs (of gate, if GATED)
    M                  rows that are computed: 8
    DEPTH              see `Few`
    """
    GATED: gl.constexpr = ACT != ""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    TURNS: gl.constexpr = ((K + 127) // 128 + WARPS - 1) // WARPS
    DEEP: gl.constexpr = 128 if GROUP % 128 == 0 else (64 if GROUP % 64 == 0 else 32)
    UNIT: gl.constexpr = 64 if BITS == 4 else 32  # inputs
    SIZE: gl.constexpr = DEEP if DEEP < UNIT else UNIT
    E2M1: gl.constexpr = scales.dtype.element_ty == gl.int32
    tile = gl.program_id(0)
    queue = ()
    for turn in gl.static_range(DEPTH if DEPTH < TURNS else TURNS):
        queue = queue + (_fetch(words, scales, zeros, tile, turn, K, GROUP, TALL, WARPS, BITS, DEEP, ACC),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    upcoming = _given(x, 0, rows, stride, K, M, WARPS, SIZE, ACC)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [0, 1])
    if residual is not None:  # beside the inputs, not behind the sums
        col = tile * (16 * TALL >> GATED) + gl.arange(0, 16 * TALL >> GATED, gl.SliceLayout(1, OUT))
        row = gl.arange(0, M, gl.SliceLayout(0, OUT)).to(gl.int64)
        inside = (col < n)[:, None] & (row < rows)[None, :]
        residual = gl.load(residual + row[None, :] * n + col[:, None], mask=inside, other=0.0)
    acc = gl.zeros([WARPS, 16 * TALL, M], gl.float32, ACC)
    for turn in gl.static_range(TURNS):
        given = upcoming
        if turn + 1 < TURNS:
            upcoming = _given(x, turn + 1, rows, stride, K, M, WARPS, SIZE, ACC)
        packed, own_scales, own_zeros = queue[turn]
        if E2M1:
            own_scales = _twice(own_scales, DEEP, True, E2M1)
        if turn + DEPTH < TURNS:
            queue = queue + (_fetch(words, scales, zeros, tile, turn + DEPTH, K, GROUP, TALL, WARPS, BITS, DEEP, ACC),)
        part = gl.zeros([WARPS, 16 * TALL, M], gl.float32, ACC)
        for piece in gl.static_range(128 // SIZE):
            if E2M1:
                numbers = _numbers(packed[piece * SIZE // UNIT], (), own_scales[piece * SIZE // DEEP], BITS, True, E2M1)
            else:
                numbers = _numbers(packed[piece * SIZE // UNIT], own_zeros[piece * SIZE // DEEP], (), BITS, False, E2M1)
            left = _pieces(numbers, SIZE)[piece % (UNIT // SIZE)].reshape([WARPS, 16 * TALL, SIZE])
            left = gl.convert_layout(left, LEFT, assert_trivial=True)
            if E2M1:
                acc = mma_v2(left, given[piece], acc)
            else:
                part = mma_v2(left, given[piece], part)
            if (piece + 1) * SIZE % DEEP == 0 and not E2M1:
                acc += part * own_scales[piece * SIZE // DEEP][:, :, None]
                part = gl.zeros([WARPS, 16 * TALL, M], gl.float32, ACC)
    _finish(gl.sum(acc, 0), bias, residual, y, tile * (16 * TALL >> GATED), 0, rows, n, ACT, OUT)


@gluon_jit
def _read_words(x, words, buffer, bar, unit, step, pred, BITS: gl.constexpr):
    """Let the copy engine read weights of a step, from `unit` on; the barrier will wait for them and for rows of x."""
    mbarrier.expect(bar, words.block_type.nbytes + x.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(words, [unit, step * (2 * BITS), 0], bar, buffer, pred=pred)


@gluon_jit
def _halves(packed, TALL: gl.constexpr, BITS: gl.constexpr):
    """Cut the words of a step, [4 TALL, 2 BITS, 32], into units [TALL, 4, 32, 4]: return them as a tuple."""
    L: gl.constexpr = gl.BlockedLayout([TALL, 1, 1, 4], [1, 1, 32, 1], [1, 4, 1, 1], [3, 2, 1, 0])
    if BITS == 4:
        one, two = gl.split(packed.reshape([TALL, 4, 2, 32, 4]).permute([0, 1, 3, 4, 2]))
        return (gl.convert_layout(one, L, assert_trivial=True), gl.convert_layout(two, L, assert_trivial=True))
    else:
        even, odd = gl.split(packed.reshape([TALL, 4, 2, 2, 32, 4]).permute([0, 1, 4, 5, 2, 3]))
        a, b = gl.split(even)
        c, d = gl.split(odd)
        return (
            gl.convert_layout(a, L, assert_trivial=True),
            gl.convert_layout(c, L, assert_trivial=True),
            gl.convert_layout(b, L, assert_trivial=True),
            gl.convert_layout(d, L, assert_trivial=True),
        )


@gluon_jit
def _operand(
    packed,
    half: gl.constexpr,
    zeros,
    scales,
    TALL: gl.constexpr,
    BITS: gl.constexpr,
    DEEP: gl.constexpr,
    SCALED: gl.constexpr,
    E2M1: gl.constexpr,
    LEFT: gl.constexpr,
):
    """Return 64 inputs of a step as the left operand [64 TALL, 64].

    packed          units of the step;  zeros, scales  tuples by group of DEEP inputs, see `_numbers`
    """
    at: gl.constexpr = half * 64 // DEEP
    after: gl.constexpr = (half * 64 + 32) // DEEP
    if BITS == 8:
        one = _numbers(packed[2 * half], zeros[at], scales[at], BITS, SCALED, E2M1)
        two = _numbers(packed[2 * half + 1], zeros[after], scales[after], BITS, SCALED, E2M1)
        numbers = gl.join(one, two).permute([0, 1, 2, 4, 3]).reshape([TALL, 4, 16, 64])
    elif DEEP == 32:  # two groups in a unit: it is converted twice, and the compiler drops what is not used
        one = _numbers(packed[half], zeros[at], scales[at], BITS, SCALED, E2M1)
        two = _numbers(packed[half], zeros[after], scales[after], BITS, SCALED, E2M1)
        both = gl.join(_pieces(one, 32)[0], _pieces(two, 32)[1]).permute([0, 1, 2, 4, 3])
        numbers = both.reshape([TALL, 4, 16, 64])
    else:
        numbers = _numbers(packed[half], zeros[at], scales[at], BITS, SCALED, E2M1)
    return gl.convert_layout(numbers.reshape([64 * TALL, 64]), LEFT, assert_trivial=True)


@gluon_jit
def _zeros_of(
    zeros, unit, step, K: gl.constexpr, GROUP: gl.constexpr, TALL: gl.constexpr, BITS: gl.constexpr, DEEP: gl.constexpr
):
    """Start to read the zero points of a step: a tuple by group, see `_numbers`."""
    found = ()
    for piece in gl.static_range(128 // DEEP):
        at = _beside_words(unit, step, piece, K, GROUP, TALL, DEEP)
        found = found + ((_zero(zeros, at, BITS), _zero(zeros, at + 8, BITS)),)
    return found


@gluon_jit
def _scales_of(
    scales,
    unit,
    step,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    TALL: gl.constexpr,
    DEEP: gl.constexpr,
    FIRST: gl.constexpr,
    ACC: gl.constexpr,
):
    """Start to read the scales of a step: a tuple by group; two tensors by lane each if FIRST, else one by output.

    Of E2M1, two tensors by lane, whose words have the scales of all groups.
    """
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    row = gl.arange(0, 64 * TALL, gl.SliceLayout(1, ACC))
    found = ()
    if scales.dtype.element_ty == gl.int32:
        at = _beside_words(unit, step, 0, K, 128, TALL, 128)
        found = (gl.load(scales + at), gl.load(scales + at + 8))
    else:
        for piece in gl.static_range(128 // DEEP):
            if FIRST:
                at = _beside_words(unit, step, piece, K, GROUP, TALL, DEEP)
                found = found + ((gl.load(scales + at), gl.load(scales + at + 8)),)
            else:
                group = gl.minimum((step * 128 + piece * DEEP) // GROUP, GROUPS - 1)
                found = found + (gl.load(scales + ((unit + row // 16) * GROUPS + group) * 16 + row % 16),)
    return found


@gluon_jit
def _beside_words(
    unit, step, piece: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, TALL: gl.constexpr, DEEP: gl.constexpr
):
    """Return the offset of each lane's scale or zero point, of output g, [TALL, 4, 32, 1]; g + 8 is 8 further on."""
    L: gl.constexpr = gl.BlockedLayout([TALL, 1, 1, 4], [1, 1, 32, 1], [1, 4, 1, 1], [3, 2, 1, 0])
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    tall = gl.arange(0, TALL, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    warp = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    group = gl.minimum((step * 128 + piece * DEEP) // GROUP, GROUPS - 1)
    return ((unit + tall * 4 + warp) * GROUPS + group) * 16 + lane // 4


@gluon_jit
def _settle(acc, running, scales, DEEP: gl.constexpr, FIRST: gl.constexpr):
    """Wait for the products of a step: return the sum, and the accumulators for the next step."""
    if FIRST:
        acc = warpgroup_mma_wait(0, deps=(running[0],))
        return acc, (acc,)
    elif DEEP == 128:
        part = warpgroup_mma_wait(0, deps=(running[0],))
        return acc + part * scales[0][:, None], (part,)
    else:
        part, other = warpgroup_mma_wait(0, deps=running)
        return acc + part * scales[0][:, None] + other * scales[1][:, None], (part, other)


@gluon_jit
def _walk(
    x,
    words,
    scales,
    zeros,
    unit,
    row,
    first,
    count,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    M: gl.constexpr,
    TALL: gl.constexpr,
    BITS: gl.constexpr,
    FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    WAIT: gl.constexpr,
):
    """Sums [64 TALL, M] of the outputs of units from `unit` on, of M rows from `row` on. Call it once in a kernel.

    x, words, scales, zeros   as in `_some_kernel`
    first, count              steps of K;  WAIT  wait for the kernel that writes x, when weights are under way
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [4, 1, 1], [2, 1, 0])
    DEEP: gl.constexpr = 128 if GROUP % 128 == 0 else (64 if GROUP % 64 == 0 else 32)
    E2M1: gl.constexpr = scales.dtype.element_ty == gl.int32
    STEPS: gl.constexpr = (K + 127) // 128
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, 4 * TALL, 2 * BITS, 32], words.layout)
    given = gl.allocate_shared_memory(gl.bfloat16, [STAGES, M, 128], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(ready.index(early), count=1)
    hopper.fence_async_shared()
    for early in gl.static_range(STAGES - 1):
        _read_words(x, words, ring.index(early), ready.index(early), unit, first + early, early < count, BITS)
    scale = _scales_of(scales, unit, first, K, GROUP, TALL, DEEP, FIRST, ACC)
    zero = _zeros_of(zeros, unit, first, K, GROUP, TALL, BITS, DEEP)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    for early in gl.static_range(STAGES - 1):
        tma.async_copy_global_to_shared(
            x, [row, (first + early) * 128], ready.index(early), given.index(early), pred=early < count
        )
    acc = gl.zeros([64 * TALL, M], gl.float32, ACC)
    running = (acc, acc) if DEEP == 64 and not FIRST else (acc,)
    # `scale` is that of this step if FIRST, else that of the step whose products are running. It is read in the loop:
    # Triton takes a variable that starts as another one and follows it by an iteration for a constant.
    for turn in range(count):
        stage = turn % STAGES
        mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
        packed = _halves(ring.index(stage).load(WORDS), TALL, BITS)
        following = gl.minimum(first + turn + 1, STEPS - 1)
        now_zero = zero
        zero = _zeros_of(zeros, unit, following, K, GROUP, TALL, BITS, DEEP)
        pairs = _twice(scale, DEEP, FIRST, E2M1)
        if FIRST:
            scale = _scales_of(scales, unit, following, K, GROUP, TALL, DEEP, FIRST, ACC)
        left = _operand(packed, 0, now_zero, pairs, TALL, BITS, DEEP, FIRST, E2M1, LEFT)
        acc, running = _settle(acc, running, scale, DEEP, FIRST)
        if not FIRST:
            scale = _scales_of(scales, unit, first + turn, K, GROUP, TALL, DEEP, FIRST, ACC)
        later, place = turn + STAGES - 1, (turn + STAGES - 1) % STAGES
        _read_words(x, words, ring.index(place), ready.index(place), unit, first + later, later < count, BITS)
        tma.async_copy_global_to_shared(
            x, [row, (first + later) * 128], ready.index(place), given.index(place), pred=later < count
        )
        right = given.index(stage).slice(0, 64, dim=1).permute((1, 0))
        one = warpgroup_mma(left, right, running[0], use_acc=FIRST, is_async=True)
        left = _operand(packed, 1, now_zero, pairs, TALL, BITS, DEEP, FIRST, E2M1, LEFT)
        right = given.index(stage).slice(64, 64, dim=1).permute((1, 0))
        if DEEP == 64 and not FIRST:
            two = warpgroup_mma(left, right, running[1], use_acc=False, is_async=True)
            running = warpgroup_mma_wait(1, deps=(one, two))
        else:
            one = warpgroup_mma(left, right, one, is_async=True)
            running = (warpgroup_mma_wait(1, deps=(one,)),)
    acc, running = _settle(acc, running, scale, DEEP, FIRST)
    return acc


@gluon_jit(do_not_specialize=["rows"])
def _some_kernel(
    x,
    words,
    scales,
    zeros,
    bias,
    residual,
    y,
    parts,
    counters,
    rows,
    n,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    M: gl.constexpr,
    TALL: gl.constexpr,
    BITS: gl.constexpr,
    ACT: gl.constexpr,
    FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """64 TALL outputs of units, of M rows, from a part of K. Grid (ceil(outputs / (64 TALL)), split, ceil(rows / M)).

    x                  descriptor of [rows, K] bf16 in tiles [M, 128]
    words              descriptor of [units, lines, 32] int32 in tiles [4 TALL, 2 BITS, 32], a line having 128 bytes
    scales, zeros      [units, K / GROUP, 16] float32; uint8 or None
    bias, residual, y  as in `gemv._few_kernel`;  n  outputs (of gate, if GATED)
    parts              [.., split, 64 TALL, M] float32: sums of the parts of K; None if split is 1
    counters           [programs / split] int32, zeros: programs of an output tile that have ended; left as zeros
    FIRST, STAGES      see `Some`
    """
    GATED: gl.constexpr = ACT != ""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: gl.constexpr = (K + 127) // 128
    tile, row = gl.program_id(0), gl.program_id(2) * M
    split = gl.num_programs(1)
    first = gl.program_id(1) * STEPS // split
    count = (gl.program_id(1) + 1) * STEPS // split - first
    gl.assume(count > 0)  # else ptxas would wait for every product
    unit = tile * (4 * TALL)
    acc = _walk(x, words, scales, zeros, unit, row, first, count, K, GROUP, M, TALL, BITS, FIRST, STAGES, PDL)
    ACC: gl.constexpr = acc.type.layout
    if parts is not None:
        SIZE: gl.constexpr = 64 * TALL * M
        place = gl.program_id(2) * gl.num_programs(0) + tile
        lanes = gl.arange(0, 64 * TALL, gl.SliceLayout(1, ACC))[:, None] * M
        mine = parts + place.to(gl.int64) * (split * SIZE) + lanes + gl.arange(0, M, gl.SliceLayout(0, ACC))[None, :]
        gl.store(mine + gl.program_id(1) * SIZE, acc)
        gl.thread_barrier()  # all stores of the program come before its tick
        if gl.atomic_add(counters + place, 1, sem="acq_rel") != split - 1:
            return
        gl.store(counters + place, 0)
        acc = gl.zeros([64 * TALL, M], gl.float32, ACC)
        for part_of_k in range(split):
            acc += gl.load(mine + part_of_k * SIZE, cache_modifier=".cg")
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    _finish(acc, bias, residual, y, tile * (64 * TALL >> GATED), row, rows, n, ACT, OUT)


@jit
def _unpack_kernel(
    words,
    scales,
    zeros,
    weight,
    n,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write 64 outputs of 128 inputs in the weight's type. Grid (ceil(K / 128), units / 4).

    words, scales, zeros   as in `_few_kernel`
    weight                 [n, K] contiguous, if GATED [2 n, K]: output
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    STEPS: tl.constexpr = (K + 127) // 128
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    DEEP: tl.constexpr = 128 if GROUP % 128 == 0 else (64 if GROUP % 64 == 0 else 32)
    SIZE: tl.constexpr = 64 * BITS  # words of a unit row's step
    step = tl.program_id(0)
    unit = tl.program_id(1) * 4 + tl.arange(0, 4)
    at = (unit.to(tl.int64)[:, None] * STEPS + step) * SIZE + tl.arange(0, SIZE)[None, :]
    packed = tl.load(words + at)
    E2M1: tl.constexpr = scales.dtype.element_ty == tl.int32
    if BITS == 4:  # [4, 2 k64, 8 g, 4 t, 4 k16, 2 k1, 2 k8, 2 +8 outputs]
        field = tl.arange(0, 8)[None, None, :]
        if E2M1:  # see `bits.PLACES`
            sign = tl.where(field % 4 == 0, 15, tl.where(field % 4 == 1, 12, tl.where(field % 4 == 2, 14, 13)))
            size = tl.where(field % 4 == 0, 6, tl.where(field % 4 == 1, 3, tl.where(field % 4 == 2, 0, 9)))
            half, packed = field // 4 * 16, packed[:, :, None]
            packed = (packed >> (sign + half) & 1) << 3 | (packed >> (size + half) & 7)
        else:
            packed = (packed[:, :, None] >> (field * 4)) & 15
        packed = tl.permute(tl.reshape(packed, [4, 2, 8, 4, 4, 2, 2, 2]), [0, 7, 2, 1, 4, 6, 3, 5])
    else:  # [4, 4 k32, 8 g, 4 t, 2 k16, 2 k8, 2 +8 outputs, 2 k1]
        packed = (packed[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 255
        packed = tl.permute(tl.reshape(packed, [4, 4, 8, 4, 2, 2, 2, 2]), [0, 6, 2, 1, 4, 5, 3, 7])
    packed = tl.reshape(packed, [64, 128 // DEEP, DEEP])
    output = tl.arange(0, 64)[:, None]
    group = tl.minimum((step * 128 + tl.arange(0, 128 // DEEP)[None, :] * DEEP) // GROUP, GROUPS - 1)
    beside = ((tl.program_id(1) * 4 + output // 16) * GROUPS + group) * 16 + output % 16
    zero = tl.zeros([64, 128 // DEEP], tl.float32) + (8.0 if BITS == 4 else 128.0)
    if zeros is not None:
        zero = tl.load(zeros + beside).to(tl.float32)
    if E2M1:
        word = tl.load(scales + ((tl.program_id(1) * 4 + output // 16) * STEPS + step) * 16 + output % 16)
        exponent = word >> (tl.arange(0, 128 // DEEP) * 8)[None, :] & 255
        numbers = small(packed) * (exponent << 23).to(tl.float32, bitcast=True)[:, :, None]
    else:
        numbers = (packed.to(tl.float32) - zero[:, :, None]) * tl.load(scales + beside)[:, :, None]
    col = step * 128 + tl.arange(0, 128)[None, :]
    row = tl.program_id(1) * 64 + output
    inside = (row < n) & (col < K)
    if GATED:  # 8 of gate, the same 8 of up
        half = row // 16 * 8 + row % 8
        inside = (half < n) & (col < K)
        row = half + row // 8 % 2 * n
    numbers = tl.reshape(numbers, [64, 128]).to(weight.dtype.element_ty)
    tl.store(weight + row.to(tl.int64) * K + col, numbers, mask=inside)
