"""Products with weights of 4 and 8 bits on tensor cores: weights become bf16 or f16 in registers.

A weight lies in tiles of ROWS outputs x `deep` inputs, one after the other, so that a program reads one piece of
memory. A byte of a 4-bit tile has input j in its low half and input j + deep / 2 in its high half. Floor: the packed
bytes over 4.3 TB/s, or 2 T N K operations over 780 TFLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels import pdl
from quire.kernels.linear.epilogue import Epilogue, finish, give_part, sum_parts
from quire.kernels.linear.gemv import bucket
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.kernels.triton_runtime import INTERPRETED, jit, tl

ROWS = 64  # outputs of a tile of weights
MOST_ROWS = 256  # rows of x
DEEP = (128, 64, 32)  # inputs of a tile: the first that divides the groups


@dataclass(frozen=True)
class Tiles:
    """The tiling of a program.

    rows    rows of x, padded to a power of two
    split   equal parts of K, which programs multiply side by side; the last program to end adds up the sums in order
    first   True: weights are scaled before the product, in x's dtype. False: the sum of each group is scaled after the
            product, in float32. MXFP4, whose scales are powers of two, is scaled before in bf16, which is exact, and
            after in f16, which does not hold all powers. NVFP4 is scaled before: a number of E2M1 times one of E4M3 has
            6 bits, which both types hold. Its factors multiply the sums
    """

    rows: int
    warps: int
    stages: int
    split: int = 1
    first: bool = False


def tiles_of(rows: int, n: int, k: int, deep: int, gated: bool) -> Tiles:
    """Return the tiling for `rows` rows of x, n outputs and k inputs. gated: n outputs of gate and n of up.

    deep   inputs of a tile of the weight
    """
    size, steps = max(16, bucket(rows)), k // deep
    wide = -(-n // ROWS) * -(-rows // 128)
    most = max(1, min(steps // 4, 528 // wide)) if rows <= 64 else max(1, min(steps // 8, 264 // wide))
    return Tiles(min(size, 128), 4, 4, max(part for part in range(1, most + 1) if steps % part == 0), rows > 32)


@dataclass(frozen=True)
class Tiled:
    """A packed weight of 4 or 8 bits in tiles, an implementation of `linear.weight_only.WeightOnly`.

    tiles      the weight, as `repack` returns it
    scales     [groups, N] float32; of MXFP4 uint8 (E8M0), of NVFP4 uint8 (E4M3)
    zeros      [groups, N] uint8 zero points; None: all are 8 (4 bits) or 128 (8 bits)
    factor     [N] float32 of NVFP4; None: 1
    counters   int32 zeros, scratch memory of `product`
    inputs     number of inputs K, without those that fill the last tile
    bits       4 or 8
    """

    tiles: Tensor
    scales: Tensor
    zeros: Tensor | None
    factor: Tensor | None
    order: Tensor | None
    counters: Tensor
    outputs: int
    inputs: int
    bits: int
    scheme: Scheme

    def product(self, x: Tensor, into: Epilogue) -> Tensor:
        """Multiply x, of few rows, by the packed weight. See `WeightOnly`."""
        if more := -self.inputs % (self.tiles.shape[3] * 8 // self.bits):
            x = F.pad(x, (0, more))
        given = self.tiles, self.scales, self.zeros, into
        return product(x, *given, bits=self.bits, counters=self.counters, factor=self.factor)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] in a floating-point type. See `WeightOnly`."""
        made = unpack(self.tiles, self.scales, self.zeros, self.bits, self.outputs, dtype, self.factor)
        return made[:, : self.inputs]


def deep_of(scheme: Scheme, inputs: int) -> int:
    """Return the inputs of a tile of a weight with `inputs` inputs; 0: its groups do not lie in tiles.

    A tile lies in one group. Of NVFP4, whose groups have 16 inputs, each half of a tile is a group.
    """
    group = scheme.block[1] or inputs
    return 2 * group if scheme.factor else next((deep for deep in DEEP if group % deep == 0), 0)


def tiled(matrix: QuantizedMatrix, deep: int) -> Tiled:
    """Return a matrix in tiles of `deep` inputs; zeros fill the last tile."""
    (n, k), bits, values = matrix.shape, matrix.scheme.bits, matrix.values
    high, scale = -(-MOST_ROWS // 128), matrix.scale.view(torch.uint8) if matrix.scheme.factor else matrix.scale
    if more := -k % deep:
        values, scale = F.pad(values, (0, more * bits // 8)), F.pad(scale, (0, more // matrix.scheme.block[1]))
    return Tiled(
        repack(values, bits, deep),
        scale.t().contiguous(),
        None if matrix.zero is None else matrix.zero.t().contiguous(),
        None if matrix.factor is None else matrix.factor.flatten(),
        None if matrix.order is None else matrix.order.long(),
        torch.zeros(-(-n // ROWS) * high, dtype=torch.int32, device=matrix.values.device),
        n,
        k,
        bits,
        matrix.scheme,
    )


def repack(values: Tensor, bits: int, deep: int) -> Tensor:
    """Return a weight in tiles, uint8 [ceil(N / ROWS), K / deep, ROWS, deep * bits / 8].

    values   uint8 [N, K] (8 bits) or [N, K / 2] (4 bits), unsigned; of 4 bits, the even input is in the low half
    deep     inputs of a tile
    """
    n = values.shape[0]
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), 2).flatten(1)
    k = values.shape[1]
    pad = -n % ROWS
    if pad:
        values = torch.cat((values, values.new_zeros(pad, k)))
    tiles = values.view(-1, ROWS, k // deep, deep).transpose(1, 2)
    if bits == 4:
        tiles = tiles[..., : deep // 2] | tiles[..., deep // 2 :] << 4
    return tiles.contiguous()


def product(
    x: Tensor,
    tiles: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    into: Epilogue,
    *,
    bits: int,
    counters: Tensor,
    factor: Tensor | None = None,
) -> Tensor:
    """Multiply x [T, K] of at most MOST_ROWS rows with a weight of N outputs; return `into.y`.

    tiles      the weight, packed by `repack`
    scales     [groups, N] float32; a group is K / groups inputs that share a scale. uint8: the weight is E2M1, and its
               scales are E8M0, or, with `factor`, E4M3
    zeros      [groups, N] uint8 zero points; None: all are 8 (4 bits) or 128 (8 bits)
    counters   [ceil(N / ROWS) * ceil(T / 128)] int32 zeros. Products that run at the same time need different counters
    factor     [N] float32 multiplies the sums of an output; None: 1
    """
    (y, bias, act, residual), gated = into, into.gated
    rows, n, (steps, deep) = x.shape[0], y.shape[1], (tiles.shape[1], tiles.shape[3] * 8 // bits)
    k = steps * deep
    walk = tiles_of(rows, n, k, deep, gated)
    if x.stride(1) != 1:
        x = x.contiguous()
    in_pdl, wide, high = pdl.in_use(), -(-n // ROWS), -(-rows // walk.rows)
    parts = None
    if walk.split > 1:
        parts = x.new_empty(wide * high * walk.split * ROWS * walk.rows << gated, dtype=torch.float32)
    _product_kernel[(wide, walk.split, high)](
        x,
        tiles,
        scales,
        zeros,
        factor,
        bias,
        residual,
        y,
        parts,
        counters,
        rows,
        n,
        x.stride(0),
        k,
        k // scales.shape[0],
        walk.rows,
        ROWS,
        deep,
        bits,
        act,
        factor is not None or (x.dtype == torch.bfloat16 if scales.dtype == torch.uint8 else walk.first),
        walk.stages,
        walk.split,
        not INTERPRETED,
        in_pdl,
        num_warps=walk.warps,
        num_stages=walk.stages,
        **pdl.options(in_pdl),
    )
    return y


def unpack(
    tiles: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    n: int,
    dtype: torch.dtype,
    factor: Tensor | None = None,
) -> Tensor:
    """Return the weight [N, K] in `dtype`; arguments as in `product`."""
    steps, deep = tiles.shape[1], tiles.shape[3] * 8 // bits
    weight = torch.empty(n, steps * deep, dtype=dtype, device=tiles.device)
    in_pdl = pdl.in_use()
    _unpack_kernel[(steps, -(-n // ROWS))](
        tiles,
        scales,
        zeros,
        factor,
        weight,
        n,
        steps * deep,
        steps * deep // scales.shape[0],
        ROWS,
        deep,
        bits,
        not INTERPRETED,
        in_pdl,
        num_warps=4,
        **pdl.options(in_pdl),
    )
    return weight


@jit
def small(codes):
    """Return the numbers of E2M1 codes times 2^-126 in float32: their bits, at the places of float32's."""
    codes = codes.to(tl.int32)
    return (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True)


@jit
def power(codes):
    """Return the powers of two of E8M0 codes in float32: exponents, but 2^-127 is the first bit behind the exponent."""
    return tl.maximum(codes.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)


@jit
def fraction(codes):
    """Return the numbers of E4M3 codes, which are not negative, in float32: their bits are the numbers times 2^-120."""
    return ((codes.to(tl.int32) & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36


@jit
def load_scale(scales, at, E4M3: tl.constexpr):
    """Load scales in float32; those of weights in E2M1 are uint8 (E8M0, or E4M3)."""
    if E4M3:
        scale = fraction(tl.load(scales + at))
    elif scales.dtype.element_ty == tl.uint8:
        scale = power(tl.load(scales + at))
    else:
        scale = tl.load(scales + at)
    return scale


@jit
def _numbers(
    packed, zero, HIGH: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
):
    """Numbers minus their zero points, exactly, in DTYPE (bf16 or f16).

    packed   uint8: 8-bit numbers, or two of 4 bits; HIGH chooses the high half
    zero     float32, broadcasts to packed's shape;  E2M1  numbers of 4 bits are E2M1, without zero points
    ASM      False: by Triton's conversions, for the interpreter
    """
    # A `return` inside an `if` would not end the function for the compiler, which wants one type of all of them.
    offset = (-128.0 - zero).to(tl.bfloat16)  # is added by `fma`: before Hopper there is no other sum of bf16x2
    if not ASM or DTYPE != tl.bfloat16:
        if BITS == 8:
            raw = packed
        else:
            raw = (packed >> 4) if HIGH else (packed & 15)
        if E2M1:
            numbers = (small(raw) * 8.507059173023462e37).to(DTYPE)  # 2^126
        else:
            numbers = (raw.to(tl.float32) - zero).to(DTYPE)
    elif E2M1 and HIGH:  # in bf16 the sign lies at 15, and the other bits at 6 are the number times 2^-126
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, none; mov.b32 c, 0x7E807E80; mov.b32 none, 0x80008000;
            prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;
            and.b32 $0, a, 0x80008000; shr.u32 a, a, 6; lop3.b32 $0, a, 0x01C001C0, $0, 0xEA;
            and.b32 $1, b, 0x80008000; shr.u32 b, b, 6; lop3.b32 $1, b, 0x01C001C0, $1, 0xEA;
            fma.rn.bf16x2 $0, $0, c, none; fma.rn.bf16x2 $1, $1, c, none; }""",
            "=&r,=&r,r",
            [packed],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    elif E2M1:
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, none; mov.b32 c, 0x7E807E80; mov.b32 none, 0x80008000;
            shl.b32 b, $2, 4; prmt.b32 a, b, 0, 0x1404; prmt.b32 b, b, 0, 0x3424;
            and.b32 $0, a, 0x80008000; shr.u32 a, a, 6; lop3.b32 $0, a, 0x01C001C0, $0, 0xEA;
            and.b32 $1, b, 0x80008000; shr.u32 b, b, 6; lop3.b32 $1, b, 0x01C001C0, $1, 0xEA;
            fma.rn.bf16x2 $0, $0, c, none; fma.rn.bf16x2 $1, $1, c, none; }""",
            "=&r,=&r,r",
            [packed],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    elif BITS == 8:  # 2^23 + q in float32, byte by byte
        numbers = tl.inline_asm_elementwise(
            """{ .reg .f32 a, b, c, d; .reg .b32 u;
            prmt.b32 u, $2, 0x4B000000, 0x7440; mov.b32 a, u; sub.f32 a, a, $3;
            prmt.b32 u, $2, 0x4B000000, 0x7441; mov.b32 b, u; sub.f32 b, b, $4;
            prmt.b32 u, $2, 0x4B000000, 0x7442; mov.b32 c, u; sub.f32 c, c, $5;
            prmt.b32 u, $2, 0x4B000000, 0x7443; mov.b32 d, u; sub.f32 d, d, $6;
            cvt.rn.bf16x2.f32 $0, b, a; cvt.rn.bf16x2.f32 $1, d, c; }""",
            "=r,=r,r,f,f,f,f",
            [packed, zero + 8388608.0],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    elif HIGH:  # 128 + q in bf16: its low byte is q, its high byte 0x43
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 t, one; shr.b32 t, $2, 4; and.b32 t, t, 0x0F0F0F0F; mov.b32 one, 0x3F803F80;
            prmt.b32 $0, t, 0x43434343, 0x4140; prmt.b32 $1, t, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, $0, one, $3; fma.rn.bf16x2 $1, $1, one, $4; }""",
            "=&r,=&r,r,r,r",
            [packed, offset],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 t, one; and.b32 t, $2, 0x0F0F0F0F; mov.b32 one, 0x3F803F80;
            prmt.b32 $0, t, 0x43434343, 0x4140; prmt.b32 $1, t, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, $0, one, $3; fma.rn.bf16x2 $1, $1, one, $4; }""",
            "=&r,=&r,r,r,r",
            [packed, offset],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return numbers


@jit
def _sums(
    tile_at,
    low_at,
    high_at,
    scale,
    other,
    zero,
    acc,
    BITS: tl.constexpr,
    E2M1: tl.constexpr,
    FIRST: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the products of a tile of weights and its inputs to acc [ROWS, M].

    tile_at           pointers of a tile [ROWS, bytes]
    low_at, high_at   pointers of the inputs [bytes, M] of the low and, with 4 bits, of the high halves of its bytes
    scale, zero       [ROWS, 1] float32
    other             [ROWS, 1] float32: scale of the high halves, which is another one only if FIRST
    """
    packed = tl.load(tile_at)
    given = tl.load(low_at)
    DTYPE: tl.constexpr = given.dtype
    numbers = _numbers(packed, zero, False, BITS, E2M1, DTYPE, ASM)
    if FIRST:
        numbers *= scale.to(DTYPE)
        acc = tl.dot(numbers, given, acc)
    else:
        part = tl.dot(numbers, given)
    if BITS == 4:
        given = tl.load(high_at)
        numbers = _numbers(packed, zero, True, BITS, E2M1, DTYPE, ASM)
        if FIRST:
            numbers *= other.to(DTYPE)
            acc = tl.dot(numbers, given, acc)
        else:
            part = tl.dot(numbers, given, part)
    if not FIRST:
        acc += part * scale
    return acc


@jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    tiles,
    scales,
    zeros,
    factor,
    bias,
    residual,
    y,
    parts,
    counters,
    rows,
    n,
    stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    DEEP: tl.constexpr,
    BITS: tl.constexpr,
    ACT: tl.constexpr,
    FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of M rows, from a part of K. Grid (ceil(n / ROWS), SPLIT, ceil(rows / M)).

    x                  [rows, K] bf16 or f16;  stride  elements from row to row
    tiles              [ceil(N / ROWS), K / DEEP, ROWS, DEEP * BITS / 8] uint8, N = n; if GATED 2 n, gate first
    scales, zeros      [K / GROUP, N] float32, or uint8 (E8M0) of E2M1; [K / GROUP, N] uint8, or None
    factor             [N] float32, or None. With it, scales are uint8 (E4M3), and each half of DEEP inputs is a group
    bias, residual, y  as in `gemv._few_kernel`
    parts              [.., SPLIT, 1 or 2, ROWS, M] float32: sums of the parts of K; None if SPLIT is 1
    counters           [programs / SPLIT] int32, zeros: programs of an output tile that have ended; left as zeros
    DEEP, BITS         inputs of an iteration; bits of a weight, 4 or 8
    FIRST              see `Tiles`;  STAGES  iterations in flight;  ASM  see `_numbers`
    """
    GATED: tl.constexpr = ACT != ""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    E2M1: tl.constexpr = scales.dtype.element_ty == tl.uint8
    E4M3: tl.constexpr = factor is not None
    BYTES: tl.constexpr = DEEP * BITS // 8
    STEPS: tl.constexpr = K // DEEP
    SHARE: tl.constexpr = STEPS // SPLIT
    col = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(2) * M + tl.arange(0, M)
    lane = tl.arange(0, BYTES)
    first = tl.program_id(1) * SHARE
    total = n
    if GATED:
        total = 2 * n
    at = tiles + (tl.program_id(0).to(tl.int64) * STEPS + first) * (ROWS * BYTES)
    at += tl.arange(0, ROWS)[:, None] * BYTES + lane[None, :]
    up_at = at + (n // ROWS).to(tl.int64) * (STEPS * ROWS * BYTES)
    given_at = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * stride + lane[:, None] + first * DEEP
    one = tl.minimum(col, n - 1)[:, None]
    acc = tl.zeros([ROWS, M], tl.float32)
    up = acc
    if PDL:
        tl.extra.cuda.gdc_wait()
    for turn in tl.range(0, SHARE, num_stages=STAGES):
        group = (first + turn) * DEEP // GROUP
        scale = load_scale(scales, group * total + one, E4M3)
        other = scale
        if E4M3:
            other = load_scale(scales, group * total + total + one, E4M3)
        zero = tl.zeros([ROWS, 1], tl.float32) + (8.0 if BITS == 4 else 128.0)
        if zeros is not None:
            zero = tl.load(zeros + group * total + one).to(tl.float32)
        low_at = given_at + turn * DEEP
        high_at = low_at + DEEP // 2
        acc = _sums(at + turn * (ROWS * BYTES), low_at, high_at, scale, other, zero, acc, BITS, E2M1, FIRST, ASM)
        if GATED:
            scale = load_scale(scales, group * total + n + one, E4M3)
            other = scale
            if E4M3:
                other = load_scale(scales, group * total + total + n + one, E4M3)
            if zeros is not None:
                zero = tl.load(zeros + group * total + n + one).to(tl.float32)
            up = _sums(up_at + turn * (ROWS * BYTES), low_at, high_at, scale, other, zero, up, BITS, E2M1, FIRST, ASM)
    if SPLIT > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        EACH: tl.constexpr = (2 if GATED else 1) * ROWS * M
        part_at = parts + tile * SPLIT * EACH + tl.arange(0, ROWS)[:, None] * M + tl.arange(0, M)[None, :]
        if give_part(acc, up, part_at, counters, tile, GATED) != SPLIT - 1:
            return
        tl.store(counters + tile, 0)
        acc, up = sum_parts(part_at, SPLIT, GATED)
    if factor is not None:
        acc *= tl.load(factor + one)
        if GATED:
            up *= tl.load(factor + n + one)
    row, col = row[None, :], col[:, None]
    finish(acc, up, bias, residual, y, row, col, n, (row < rows) & (col < n), ACT)


@jit
def _unpack_kernel(
    tiles,
    scales,
    zeros,
    factor,
    weight,
    n,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DEEP: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a tile of weights in x's dtype. Grid (K / DEEP, ceil(n / ROWS)); arguments as in `_product_kernel`.

    weight   [n, K] contiguous, output
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    E2M1: tl.constexpr = scales.dtype.element_ty == tl.uint8
    BYTES: tl.constexpr = DEEP * BITS // 8
    step = tl.program_id(0)
    col = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, BYTES)[None, :]
    at = tiles + (tl.program_id(1).to(tl.int64) * (K // DEEP) + step) * (ROWS * BYTES)
    packed = tl.load(at + tl.arange(0, ROWS)[:, None] * BYTES + lane)
    one = step * DEEP // GROUP * n + tl.minimum(col, n - 1)
    scale = load_scale(scales, one, factor is not None)
    other = scale
    zero = tl.zeros([ROWS, 1], tl.float32) + (8.0 if BITS == 4 else 128.0)
    if zeros is not None:
        zero = tl.load(zeros + one).to(tl.float32)
    if factor is not None:
        own = tl.load(factor + tl.minimum(col, n - 1))
        other = load_scale(scales, one + n, True) * own
        scale *= own
    DTYPE: tl.constexpr = weight.dtype.element_ty
    to = weight + col.to(tl.int64) * K + step * DEEP + lane
    low = _numbers(packed, zero, False, BITS, E2M1, DTYPE, ASM).to(tl.float32) * scale
    tl.store(to, low.to(DTYPE), mask=col < n)
    if BITS == 4:
        high = _numbers(packed, zero, True, BITS, E2M1, DTYPE, ASM).to(tl.float32) * other
        tl.store(to + DEEP // 2, high.to(DTYPE), mask=col < n)
