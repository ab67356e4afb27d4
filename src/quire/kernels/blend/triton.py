"""Moves and deviations of cached keys and values on NVIDIA GPUs: a program for each token."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention import KVView
from quire.kernels.attention.eight_bits import is_coded
from quire.kernels.attention.triton_tiles import coded, finite
from quire.kernels.triton_runtime import jit, tl


def move(kv: KVView, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write the values and the rotated keys of `sources` to `targets`. See `quire.kernels.blend`."""
    if len(sources):
        _move_kernel[(len(sources),)](
            kv.k, kv.v, sources, targets, cos, sin, *_strides(kv), is_coded(kv.k), **_sizes(kv)
        )


def deviation(kv: KVView, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the squared distance of each target from its moved source. See `quire.kernels.blend`."""
    found = torch.empty(len(sources), dtype=torch.float32, device=sources.device)
    if len(sources):
        _deviation_kernel[(len(sources),)](
            kv.k, kv.v, sources, targets, cos, sin, found, kv.k_scale, kv.v_scale, *_strides(kv), **_sizes(kv)
        )
    return found


def _strides(kv: KVView) -> tuple[int, ...]:
    """Return the strides of blocks, heads and tokens of keys, then of values, in elements."""
    assert kv.k.stride(3) == kv.v.stride(3) == 1, "a head of a token is contiguous"
    return *kv.k.stride()[:3], *kv.v.stride()[:3]


def _sizes(kv: KVView) -> dict[str, int]:
    heads, half, dim = kv.k.shape[1], kv.k.shape[3] // 2, kv.v.shape[3]
    return {
        "SIZE": kv.block_size,
        "HEADS": heads,
        "HEADSP": _power(heads),
        "HALF": half,
        "HALFP": _power(half),
        "DIM": dim,
        "DIMP": _power(dim),
        "num_warps": 4,
    }


def _power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@jit
def _turned(first, second, cos, sin):
    """Return both halves of rotated keys [heads, HALF]; cos, sin [1, HALF], sin not negated."""
    return first * cos - second * sin, second * cos + first * sin


@jit
def _move_kernel(
    k,
    v,
    sources,
    targets,
    cos,
    sin,
    k_block,
    k_head,
    k_token,
    v_block,
    v_head,
    v_token,
    CODED: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADSP: tl.constexpr,
    HALF: tl.constexpr,
    HALFP: tl.constexpr,
    DIM: tl.constexpr,
    DIMP: tl.constexpr,
):
    """Move a token. Grid (N,).

    k, v               cache [blocks, HEADS, SIZE, 2 HALF] and [blocks, HEADS, SIZE, DIM]
    sources, targets   [N] int64 slots;  cos, sin  [N, 2 HALF] float32
    k_block, k_head, k_token   elements from block to block, head to head, token to token of keys; v_...: of values
    CODED              True: an 8-bit cache
    HEADSP, HALFP, DIMP        HEADS, HALF and DIM padded to powers of two
    """
    token = tl.program_id(0).to(tl.int64)
    source, target = tl.load(sources + token), tl.load(targets + token)
    heads, col, dims = tl.arange(0, HEADSP)[:, None], tl.arange(0, HALFP)[None, :], tl.arange(0, DIMP)[None, :]
    inside = (heads < HEADS) & (col < HALF)
    old = k + source // SIZE * k_block + heads * k_head + source % SIZE * k_token + col
    new = k + target // SIZE * k_block + heads * k_head + target % SIZE * k_token + col
    c = tl.load(cos + token * (2 * HALF) + col, mask=col < HALF, other=0.0)
    s = tl.load(sin + token * (2 * HALF) + HALF + col, mask=col < HALF, other=0.0)
    first = tl.load(old, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(old + HALF, mask=inside, other=0.0).to(tl.float32)
    first, second = _turned(first, second, c, s)
    if CODED:
        first, second = coded(first, 1.0, k.dtype.element_ty), coded(second, 1.0, k.dtype.element_ty)
    else:
        first, second = finite(first.to(k.dtype.element_ty)), finite(second.to(k.dtype.element_ty))
    tl.store(new, first, mask=inside)
    tl.store(new + HALF, second, mask=inside)
    inside = (heads < HEADS) & (dims < DIM)
    old = v + source // SIZE * v_block + heads * v_head + source % SIZE * v_token + dims
    new = v + target // SIZE * v_block + heads * v_head + target % SIZE * v_token + dims
    tl.store(new, tl.load(old, mask=inside, other=0.0), mask=inside)


@jit
def _deviation_kernel(
    k,
    v,
    sources,
    targets,
    cos,
    sin,
    found,
    k_scale,
    v_scale,
    k_block,
    k_head,
    k_token,
    v_block,
    v_head,
    v_token,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADSP: tl.constexpr,
    HALF: tl.constexpr,
    HALFP: tl.constexpr,
    DIM: tl.constexpr,
    DIMP: tl.constexpr,
):
    """Compute the squared distance of a token's target from its moved source. Grid (N,).

    found              [N] float32, output
    k_scale, v_scale   factors of keys and values: the scales of an 8-bit cache

    Other arguments: see `_move_kernel`.
    """
    token = tl.program_id(0).to(tl.int64)
    source, target = tl.load(sources + token), tl.load(targets + token)
    heads, col, dims = tl.arange(0, HEADSP)[:, None], tl.arange(0, HALFP)[None, :], tl.arange(0, DIMP)[None, :]
    inside = (heads < HEADS) & (col < HALF)
    old = k + source // SIZE * k_block + heads * k_head + source % SIZE * k_token + col
    new = k + target // SIZE * k_block + heads * k_head + target % SIZE * k_token + col
    c = tl.load(cos + token * (2 * HALF) + col, mask=col < HALF, other=0.0)
    s = tl.load(sin + token * (2 * HALF) + HALF + col, mask=col < HALF, other=0.0)
    first = tl.load(old, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(old + HALF, mask=inside, other=0.0).to(tl.float32)
    first, second = _turned(first, second, c, s)
    first = (tl.load(new, mask=inside, other=0.0).to(tl.float32) - first) * k_scale
    second = (tl.load(new + HALF, mask=inside, other=0.0).to(tl.float32) - second) * k_scale
    distance = tl.sum(tl.sum(first * first + second * second, 1), 0)
    inside = (heads < HEADS) & (dims < DIM)
    old = v + source // SIZE * v_block + heads * v_head + source % SIZE * v_token + dims
    new = v + target // SIZE * v_block + heads * v_head + target % SIZE * v_token + dims
    values = tl.load(new, mask=inside, other=0.0).to(tl.float32) - tl.load(old, mask=inside, other=0.0).to(tl.float32)
    values *= v_scale
    tl.store(found + token, distance + tl.sum(tl.sum(values * values, 1), 0))
