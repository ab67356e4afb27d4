"""Tiles of a cache of latents on a GPU; rows of latents with scales of their own (fp8_ds_mla) also written and widened.

The rule of rows is that of `rows.py`. Numbers are made of codes when a tile is read, in the type of the queries.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quire.kernels.attention.triton_tiles import NO_ASSEMBLY, coded, load_tile
from quire.kernels.latent import LatentView
from quire.kernels.latent.rows import LEAST
from quire.kernels.latent_rows import TILE
from quire.kernels.triton_runtime import jit, tl

SHARING = None if tl is None else tl.constexpr(TILE)  # codes that share a scale
SMALLEST = None if tl is None else tl.constexpr(LEAST)
TOKENS = 16  # of a program that widens rows


@jit
def scaled(codes, scales, DTYPE: tl.constexpr):
    """Return the numbers, of type DTYPE, of codes [N, LP] with scales [N, G]."""
    N: tl.constexpr = codes.shape[0]
    G: tl.constexpr = scales.shape[1]
    LP: tl.constexpr = codes.shape[1]
    parts = tl.reshape(codes.to(tl.float32), [N, G, LP // G])
    return _rounded(tl.reshape(parts * scales[:, :, None], [N, LP]), DTYPE)


@jit
def _rounded(numbers, DTYPE: tl.constexpr):
    """Round float32 numbers to DTYPE, by assembly that Triton does not move (`is_pure`).

    Triton would move the conversion of a tile behind the loads of a matrix unit's operand. These take single words in
    another order, and the tile is converted again for its use as values.
    """
    if NO_ASSEMBLY or DTYPE == tl.float32:
        rounded = numbers.to(DTYPE)
    elif DTYPE == tl.bfloat16:
        rounded = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [numbers], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    else:
        rounded = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [numbers], dtype=tl.float16, is_pure=False, pack=2
        )
    return rounded


@jit
def widened(latents, DTYPE: tl.constexpr):
    """Convert a tile of numbers or of codes to DTYPE; codes by way of float32, as the GPU has no fast direct way."""
    if latents.dtype.primitive_bitwidth == 8:
        latents = _rounded(latents.to(tl.float32), DTYPE)
    else:
        latents = latents.to(DTYPE)
    return latents


@jit
def load_latents(
    latent,
    rope,
    scales,
    ids,
    start,
    end,
    latent_block,
    rope_block,
    DTYPE: tl.constexpr,
    M: tl.constexpr,
    GUARDED: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    LATENT_TOKEN: tl.constexpr,
    ROPE_TOKEN: tl.constexpr,
):
    """Load latents [TILE, LP] and rotated keys [TILE, RP] of TILE tokens from `start` on, as numbers of type DTYPE.

    latent, rope, scales       cache; scales None: numbers, or codes of one scale, which stay codes
    latent_block, rope_block   elements from block to block of latent, of rope
    LATENT_TOKEN, ROPE_TOKEN   elements from token to token of latent, of rope
    M                          lanes of the product: below 64 rotated keys of rows are rounded as latents are, or Triton
                               loads them in a way for which other registers are spilled
    Other arguments: see `load_tile`.
    """
    turned = load_tile(rope, ids, start, end, rope_block, ROPE_TOKEN, GUARDED, SIZE, TILE, R, RP)
    latents = load_tile(latent, ids, start, end, latent_block, LATENT_TOKEN, GUARDED, SIZE, TILE, L, LP)
    if scales is None:
        latents, turned = widened(latents, DTYPE), widened(turned, DTYPE)
    else:
        own = load_tile(
            scales,
            ids,
            start,
            end,
            latent_block // 4,
            LATENT_TOKEN // 4,
            GUARDED,
            SIZE,
            TILE,
            (L + SHARING - 1) // SHARING,
            max(1, LP // SHARING),
        )
        latents = scaled(latents, own, DTYPE)
        turned = _rounded(turned.to(tl.float32), DTYPE) if M < 64 else turned.to(DTYPE)
    return latents, turned


@jit
def store_latent(numbers, latent, scales, L: tl.constexpr, LP: tl.constexpr):
    """Write a latent, finite numbers [LP] of which those from L on are 0, to a row.

    latent, scales   pointers to the codes and to the scales of the row
    """
    GROUPS: tl.constexpr = max(1, LP // SHARING)
    parts = tl.reshape(numbers.to(tl.float32), [GROUPS, LP // GROUPS])
    own = tl.maximum(tl.div_rn(tl.max(tl.abs(parts), 1), tl.full([GROUPS], 448.0, tl.float32)), SMALLEST)
    codes = coded(tl.div_rn(parts, tl.broadcast_to(own[:, None], parts.shape)), 1.0, latent.dtype.element_ty)
    dims, group = tl.arange(0, LP), tl.arange(0, GROUPS)
    tl.store(latent + dims, tl.reshape(codes, [LP]), mask=dims < L)
    tl.store(scales + group, own, mask=group * SHARING < L)


def widen(
    cache: LatentView, blocks: Tensor, offsets: Tensor, dtype: torch.dtype, space: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the latents [n, L] and rotated keys [n, R] of n tokens of a cache of codes, as numbers of type `dtype`.

    blocks, offsets   [n] int64: block of each token in the cache, and its offset in the block
    space             memory for at least n (L + R) numbers; None: it is allocated
    The scale of all codes, if there is one, is not applied.
    """
    latent, rope, count = cache.latent, cache.rope, len(blocks)
    widths = [side.shape[3] for side in (latent, rope)]
    if space is None:
        space = torch.empty(count * sum(widths), dtype=dtype, device=latent.device)
    parts = space[: count * sum(widths)].split([count * width for width in widths])
    made = [part.view(count, width) for part, width in zip(parts, widths, strict=True)]
    _widen_rows[(-(-len(blocks) // TOKENS),)](
        latent,
        rope,
        cache.scales,
        blocks,
        offsets,
        *made,
        len(blocks),
        latent.stride(0),
        rope.stride(0),
        N=TOKENS,
        L=latent.shape[3],
        LP=padded(latent.shape[3]),
        R=rope.shape[3],
        RP=padded(rope.shape[3]),
        LATENT_TOKEN=latent.stride(2),
        ROPE_TOKEN=rope.stride(2),
        num_warps=4,
    )
    return made[0], made[1]


@jit(do_not_specialize=["count"])
def _widen_rows(
    latent,
    rope,
    scales,
    blocks,
    offsets,
    to_latent,
    to_rope,
    count,
    latent_block,
    rope_block,
    N: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    LATENT_TOKEN: tl.constexpr,
    ROPE_TOKEN: tl.constexpr,
):
    """Read N rows, and write their numbers. Grid (ceil(count / N),).

    blocks, offsets      [count] int64: block and offset in the cache of each token
    to_latent, to_rope   [count, L] and [count, R], outputs
    Other arguments: see `load_latents`.
    """
    token = tl.program_id(0) * N + tl.arange(0, N)
    inside = token < count
    block = tl.load(blocks + token, mask=inside, other=0)
    offset = tl.load(offsets + token, mask=inside, other=0)
    latents, turned = load_tokens(
        latent,
        rope,
        scales,
        block,
        offset,
        inside,
        latent_block,
        rope_block,
        to_latent.dtype.element_ty,
        64,
        L,
        LP,
        R,
        RP,
        LATENT_TOKEN,
        ROPE_TOKEN,
    )
    dims, few, token = tl.arange(0, LP)[None, :], tl.arange(0, RP)[None, :], token.to(tl.int64)[:, None]
    tl.store(to_latent + token * L + dims, latents, mask=inside[:, None] & (dims < L))
    tl.store(to_rope + token * R + few, turned, mask=inside[:, None] & (few < R))


@jit
def load_tokens(
    latent,
    rope,
    scales,
    block,
    offset,
    inside,
    latent_block,
    rope_block,
    DTYPE: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    LATENT_TOKEN: tl.constexpr,
    ROPE_TOKEN: tl.constexpr,
):
    """Load latents [N, LP] and rotated keys [N, RP] of any tokens, as numbers of type DTYPE. Others are zeros.

    block, offset, inside   [N]: int64 block of a token, offset in the block, False: it is not read
    Other arguments: see `load_latents`.
    """
    dims, few = tl.arange(0, LP), tl.arange(0, RP)
    from_latent = latent + (block * latent_block + offset * LATENT_TOKEN)[:, None] + dims[None, :]
    latents = tl.load(from_latent, mask=inside[:, None] & (dims < L)[None, :], other=0.0)
    from_rope = rope + (block * rope_block + offset * ROPE_TOKEN)[:, None] + few[None, :]
    turned = tl.load(from_rope, mask=inside[:, None] & (few < R)[None, :], other=0.0)
    if scales is None:
        latents, turned = widened(latents, DTYPE), widened(turned, DTYPE)
    else:
        group = tl.arange(0, max(1, LP // SHARING))
        rows = block * (latent_block // 4) + offset * (LATENT_TOKEN // 4)
        known = inside[:, None] & (group * SHARING < L)[None, :]
        own = tl.load(scales + rows[:, None] + group[None, :], mask=known, other=0.0)
        latents = scaled(latents, own, DTYPE)
        turned = _rounded(turned.to(tl.float32), DTYPE) if M < 64 else turned.to(DTYPE)
    return latents, turned


@functools.cache
def padded(value: int) -> int:
    """Return the side of a tile for `value` numbers: the smallest power of two that is not below it, and 16 or more."""
    return max(16, 1 << (value - 1).bit_length())
