"""Latent attention to chosen tokens on Hopper: a Gluon kernel for many rows. Contract: see `quire.kernels.latent`.

Two groups of four warps share 64 heads of a row: each computes the scores of half of a tile's tokens, and the sums of
half of a latent's numbers. In Triton's kernel both groups compute all scores, and a tile is gathered only while the
sums of the tile before it are computed. Here it is gathered beside scores and softmax, too.

Floor: 4 H (L + R / 2) operations a chosen token. A tile of 64 tokens takes 2,200 clocks of the matrix units, and 3,100
of the L2 cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta
from quire.kernels.attention.hopper_prefill import as_operand
from quire.kernels.attention.triton_plan import multiprocessors
from quire.kernels.attention.triton_tiles import LOG2E
from quire.kernels.index.triton_places import places_of
from quire.kernels.latent import LatentView, triton
from quire.kernels.triton_runtime import gl, gluon_jit, hopper

if hopper is not None:
    async_copy, fence_async_shared = hopper.async_copy, hopper.fence_async_shared
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait

LATENT, TURNED, GROUP, TILE = 512, 64, 64, 64  # widths L and R; heads of a program; tokens of a tile


def chosen(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentView,
    meta: AttentionMeta,
    scale: float,
    positions: Tensor,
    first: int = 0,
) -> Tensor:
    """Return softmax-weighted sums of the latents at `positions` [T, H, L]. See `quire.kernels.latent`.

    Few rows are cut into parts, by Triton's kernel.
    """
    tokens, heads, dim = q_latent.shape
    fits = (dim, q_rope.shape[2]) == (LATENT, TURNED) and heads % GROUP == 0 and cache.latent.dtype == torch.bfloat16
    if not fits or tokens * heads < triton.PROGRAMS * multiprocessors() * GROUP:
        return triton.chosen(q_latent, q_rope, cache, meta, scale, positions, first)
    assert q_latent.is_contiguous() and q_rope.stride(2) == 1 and positions.is_contiguous()
    out, places = torch.empty_like(q_latent), places_of(meta, len(meta.kv_slots))[first:]
    _chosen_kernel[(tokens * heads // GROUP,)](
        q_latent,
        q_rope,
        out,
        cache.latent,
        cache.rope,
        places,
        triton.slots_of(positions, places, cache, meta),
        q_latent.stride(0),
        *q_rope.stride()[:2],
        cache.latent.stride(0),
        cache.rope.stride(0),
        scale * cache.scale * LOG2E,
        positions.shape[1],
        SIZE=cache.block_size,
        TILE=TILE,
        L=dim,
        R=TURNED,
        GROUP=GROUP,
        HEADS=heads // GROUP,
        num_warps=8,
    )
    return out


@gluon_jit
def _gather(buffers, rows, block, SIZE: gl.constexpr, slots, begin, count, LAYOUT: gl.constexpr):
    """Start to copy a tile's rows, from entry `begin` of `slots` on, to a buffer [TILE, width]; zeros from `count` on.

    rows    [blocks, SIZE, width] in a cache, `block` elements from block to block
    """
    entry = begin + gl.arange(0, buffers.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, buffers.shape[1], gl.SliceLayout(0, LAYOUT))
    slot = gl.load(slots + entry, mask=entry < count, other=0)
    at = rows + ((slot // SIZE).to(gl.int64) * block + (slot % SIZE) * buffers.shape[1])[:, None] + dims[None, :]
    async_copy.async_copy_global_to_shared(buffers, at, mask=(entry < count)[:, None])


@gluon_jit
def _chosen_kernel(
    q_latent,
    q_rope,
    out,
    latent,
    rope,
    places,
    slots,
    stride_latent,
    stride_rope,
    stride_rope_head,
    latent_block,
    rope_block,
    scale,
    top_k,
    SIZE: gl.constexpr,
    TILE: gl.constexpr,
    L: gl.constexpr,
    R: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Compute attention of a row to its tokens, for GROUP heads. Grid (rows * HEADS,). 8 warps.

    slots            [rows, top_k] int32 of `slots_kernel`
    places           [rows, 2] position of each row, and another number; a position of -1: the row is padding
    HEADS, GROUP     groups of heads; heads of a group. Other arguments: see `chosen_kernel`
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TILE // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, L // 2, 16])
    LONG: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    SHORT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    work = gl.program_id(0)
    row = (work // HEADS).to(gl.int64)
    group, count = work % HEADS, gl.minimum(gl.load(places + 2 * row) + 1, top_k)
    slots += row * top_k
    plain = gl.allocate_shared_memory(latent.dtype.element_ty, [GROUP, L], SHARED)
    turned = gl.allocate_shared_memory(latent.dtype.element_ty, [GROUP, R], SHARED)
    keys = gl.allocate_shared_memory(latent.dtype.element_ty, [2, TILE, L], SHARED)
    short = gl.allocate_shared_memory(latent.dtype.element_ty, [2, TILE, R], SHARED)
    _gather(keys.index(0), latent, latent_block, SIZE, slots, 0, count, LONG)
    _gather(short.index(0), rope, rope_block, SIZE, slots, 0, count, SHORT)
    async_copy.commit_group()
    head, dims = gl.arange(0, GROUP, gl.SliceLayout(1, LONG)), gl.arange(0, L, gl.SliceLayout(0, LONG))
    plain.store(gl.load(q_latent + row * stride_latent + ((group * GROUP + head) * L)[:, None] + dims[None, :]))
    head, dims = gl.arange(0, GROUP, gl.SliceLayout(1, SHORT)), gl.arange(0, R, gl.SliceLayout(0, SHORT))
    pointers = q_rope + row * stride_rope + ((group * GROUP + head) * stride_rope_head)[:, None] + dims[None, :]
    turned.store(gl.load(pointers))
    top = gl.full([GROUP], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
    weights = gl.zeros([GROUP, TILE], gl.float32, SCORES)  # a thread's own sums: they are added up once
    sums = gl.zeros([GROUP, L], gl.float32, SUMS)
    columns = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    for tile in range(gl.cdiv(count, TILE)):
        stage, begin = tile % 2, tile * TILE
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()  # the tile is there for both groups, and both are done with the last one
        scores = warpgroup_mma(
            turned,
            short.index(stage).permute((1, 0)),
            gl.zeros([GROUP, TILE], gl.float32, SCORES),
            use_acc=False,
            is_async=True,
        )
        scores = warpgroup_mma(plain, keys.index(stage).permute((1, 0)), scores, is_async=True)
        _gather(keys.index(stage ^ 1), latent, latent_block, SIZE, slots, begin + TILE, count, LONG)
        _gather(short.index(stage ^ 1), rope, rope_block, SIZE, slots, begin + TILE, count, SHORT)
        async_copy.commit_group()
        scores = warpgroup_mma_wait(0, deps=(scores,))
        scores = gl.where((begin + columns < count)[None, :], scores, float("-inf"))
        above = gl.maximum(top, gl.max(scores, 1) * scale)
        own, decay, top = gl.exp2(scores * scale - above[:, None]), gl.exp2(top - above), above
        weights = weights * decay[:, None] + own
        sums = sums * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
        sums = warpgroup_mma(as_operand(own, keys.dtype, SUMS), keys.index(stage), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))  # under way in the next iteration, ptxas would wait for each product
    async_copy.wait_group(0)
    weight = gl.convert_layout(gl.sum(weights, 1), gl.SliceLayout(1, SUMS))
    lane, numbers = gl.arange(0, GROUP, gl.SliceLayout(1, SUMS)), gl.arange(0, L, gl.SliceLayout(0, SUMS))
    to = out + row * stride_latent + ((group * GROUP + lane) * L)[:, None] + numbers[None, :]
    gl.store(to, (sums / weight[:, None]).to(out.dtype.element_ty), mask=(lane < GROUP)[:, None] & (count > 0))
