"""Products with weights of 4 and 8 bits on tensor cores: weights become bf16 or f16 in registers.

A weight lies in tiles of ROWS outputs x `deep` inputs, one after the other, so that a program reads one piece of
memory. A byte of a 4-bit tile has input j in its low half and input j + deep / 2 in its high half. Floor: the packed
bytes over 4.3 TB/s, or 2 T N K operations over 780 TFLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.linear.epilogue import Epilogue, finish, give_part, sum_parts
from quire.kernels.linear.gemv import bucket
from quire.kernels.triton_runtime import INTERPRETED, jit, tl

ROWS = 64  # outputs of a tile of weights
MOST_ROWS = 256  # rows of x


@dataclass(frozen=True)
class Tiles:
    """The tiling of a program.

    rows    rows of x, padded to a power of two
    split   equal parts of K, which programs multiply side by side; the last program to end adds up the sums in order
    first   True: weights are scaled before the product, in x's dtype. False: the sum of each group is scaled after the
            product, in float32. Weights in E2M1, whose scales are powers of two, are scaled before in bf16, which is
            exact, and after in f16, which does not hold all powers
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
) -> Tensor:
    """Multiply x [T, K] of at most MOST_ROWS rows with a weight of N outputs; return `into.y`.

    tiles      the weight, packed by `repack`
    scales     [groups, N] float32; a group is K / groups inputs that share a scale. uint8 (E8M0): the weight is E2M1
    zeros      [groups, N] uint8 zero points; None: all are 8 (4 bits) or 128 (8 bits)
    counters   [ceil(N / ROWS) * ceil(T / 128)] int32 zeros. Products that run at the same time need different counters
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
        x.dtype == torch.bfloat16 if scales.dtype == torch.uint8 else walk.first,
        walk.stages,
        walk.split,
        not INTERPRETED,
        in_pdl,
        num_warps=walk.warps,
        num_stages=walk.stages,
        **pdl.options(in_pdl),
    )
    return y


def unpack(tiles: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, n: int, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] in `dtype`; arguments as in `product`."""
    steps, deep = tiles.shape[1], tiles.shape[3] * 8 // bits
    weight = torch.empty(n, steps * deep, dtype=dtype, device=tiles.device)
    in_pdl = pdl.in_use()
    _unpack_kernel[(steps, -(-n // ROWS))](
        tiles,
        scales,
        zeros,
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
def load_scale(scales, at):
    """Load scales in float32; those of weights in E2M1 are uint8 (E8M0)."""
    if scales.dtype.element_ty == tl.uint8:
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
            numbers *= scale.to(DTYPE)
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
        scale = load_scale(scales, group * total + one)
        zero = tl.zeros([ROWS, 1], tl.float32) + (8.0 if BITS == 4 else 128.0)
        if zeros is not None:
            zero = tl.load(zeros + group * total + one).to(tl.float32)
        low_at = given_at + turn * DEEP
        high_at = low_at + DEEP // 2
        acc = _sums(at + turn * (ROWS * BYTES), low_at, high_at, scale, zero, acc, BITS, E2M1, FIRST, ASM)
        if GATED:
            scale = load_scale(scales, group * total + n + one)
            if zeros is not None:
                zero = tl.load(zeros + group * total + n + one).to(tl.float32)
            up = _sums(up_at + turn * (ROWS * BYTES), low_at, high_at, scale, zero, up, BITS, E2M1, FIRST, ASM)
    if SPLIT > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        EACH: tl.constexpr = (2 if GATED else 1) * ROWS * M
        part_at = parts + tile * SPLIT * EACH + tl.arange(0, ROWS)[:, None] * M + tl.arange(0, M)[None, :]
        if give_part(acc, up, part_at, counters, tile, GATED) != SPLIT - 1:
            return
        tl.store(counters + tile, 0)
        acc, up = sum_parts(part_at, SPLIT, GATED)
    row, col = row[None, :], col[:, None]
    finish(acc, up, bias, residual, y, row, col, n, (row < rows) & (col < n), ACT)


@jit
def _unpack_kernel(
    tiles,
    scales,
    zeros,
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
    scale = load_scale(scales, one)
    zero = tl.zeros([ROWS, 1], tl.float32) + (8.0 if BITS == 4 else 128.0)
    if zeros is not None:
        zero = tl.load(zeros + one).to(tl.float32)
    DTYPE: tl.constexpr = weight.dtype.element_ty
    to = weight + col.to(tl.int64) * K + step * DEEP + lane
    low = _numbers(packed, zero, False, BITS, E2M1, DTYPE, ASM).to(tl.float32) * scale
    tl.store(to, low.to(DTYPE), mask=col < n)
    if BITS == 4:
        high = _numbers(packed, zero, True, BITS, E2M1, DTYPE, ASM).to(tl.float32) * scale
        tl.store(to + DEEP // 2, high.to(DTYPE), mask=col < n)
