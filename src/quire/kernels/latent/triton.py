"""Latent attention on NVIDIA GPUs: the launches, and the kernel that fills the cache.

    triton_project, triton_absorbed   sequences of few rows
    triton_shared                     decodes that share the beginning of their context
    triton_join                       parts of contexts that lie on several ranks
    triton_chosen                     rows that attend to chosen tokens
    triton_contexts                   what many of these rows read, made of codes once
    triton_expanded                   sequences of many rows
    triton_rows                       numbers of a cache of rows (fp8_ds_mla)

Tuned for latents of 512, rotated keys of 64 and 16 to 128 heads; correct for other sizes. The host reads nothing from
the device: steps without `meta.prompts` can be captured.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention import AttentionMeta
from quire.kernels.attention.eight_bits import is_coded
from quire.kernels.attention.triton_plan import ITEM_WORDS, TILE_WORDS, Shape, multiprocessors, plan_step, shared_memory
from quire.kernels.attention.triton_tiles import LOG2E, coded, finite
from quire.kernels.index.triton_places import places_of
from quire.kernels.latent import LatentView
from quire.kernels.latent.layouts import check_expanded, check_queries, check_rows
from quire.kernels.latent.triton_absorbed import absorbed_kernel, merge_kernel
from quire.kernels.latent.triton_chosen import chosen_kernel, join_kernel, slots_kernel
from quire.kernels.latent.triton_contexts import plain_contexts
from quire.kernels.latent.triton_expanded import STEP, cut_prompts, expanded_kernel, workspace
from quire.kernels.latent.triton_join import join
from quire.kernels.latent.triton_project import project
from quire.kernels.latent.triton_rows import padded, store_latent
from quire.kernels.latent.triton_shared import shared_kernel
from quire.kernels.triton_runtime import jit, tl

__all__ = ["absorbed", "chosen", "expanded", "join", "prepare", "project"]

# Tilings of `absorbed` by lanes (pairs of a row and a head in a program): keys of an iteration, warps, iterations in
# flight, and programs that run on a multiprocessor at the same time. ALONE: with 16 lanes, for steps of few rows.
ALONE = (64, 4, 2, 2)
CUTS = {16: (32, 4, 3, 2), 32: (64, 8, 2, 1), 64: (64, 8, 2, 1)}
# Tilings of `expanded`, the first that fits is used: rows of a tile, keys of an iteration, warps, iterations in flight.
MANY = ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (16, 16, 4, 1))
EXACT = {torch.float32: "ieee"}  # precision of products of float32
PARTS = 128  # most parts of a sequence's context
PREFIX_PARTS = 32  # most parts of a shared prefix
PROGRAMS = 2  # of `chosen` on a multiprocessor, at least, before a row is cut into parts
MOST_PARTS = 32  # of the chosen tokens of a row
MERGING = 4  # programs per multiprocessor that add up parts
TURNED = 16  # heads of a token that a program rotates
WORKSPACE = 256 << 20  # bytes of expanded keys and values at a time


def prepare(
    q: Tensor, kv: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, cache: LatentView, kv_slots: Tensor
) -> Tensor:
    """Rotate q in place; write normalized latents and rotated keys to the cache; return q.

    See `quire.kernels.latent`.
    """
    tokens, heads, width = q.shape
    latent, rope, scales = cache.latent, cache.rope, cache.scales
    dim, turned = latent.shape[3], rope.shape[3]
    check_rows(q, kv, cache)
    if tokens:
        in_pdl = pdl.in_use()
        common = _common_scale(cache)
        inverse = None if common is None else 1.0 / common
        _prepare_kernel[(tokens, 1 + -(-heads // TURNED))](
            q,
            kv,
            norm,
            cos,
            sin,
            latent,
            rope,
            scales,
            kv_slots,
            q.stride(0),
            kv.stride(0),
            latent.stride(0),
            rope.stride(0),
            eps,
            inverse,
            heads,
            width,
            turned // 2,
            padded(turned // 2),
            dim,
            padded(dim),
            latent.stride(2),
            rope.stride(2),
            cache.block_size,
            TURNED,
            in_pdl,
            num_warps=2,
            **pdl.options(in_pdl),
        )
    return q


@jit
def _prepare_kernel(
    q,
    kv,
    norm,
    cos,
    sin,
    latent,
    rope,
    scales,
    kv_slots,
    stride_q,
    stride_kv,
    latent_block,
    rope_block,
    eps,
    inverse,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALFP: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    LATENT_TOKEN: tl.constexpr,
    ROPE_TOKEN: tl.constexpr,
    SIZE: tl.constexpr,
    TURNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Fill the cache and rotate queries. Grid (tokens, 1 + ceil(HEADS / TURNED)): first the cache, then heads of q.

    q                     [T, HEADS, WIDTH], rotated in place; stride_q  elements from token to token
    kv                    [T, L + 2 HALF]; stride_kv  elements from token to token
    norm, eps             [L] weight of the norm of the latent, and its epsilon
    cos, sin              [T, 2 HALF] contiguous; sin is signed
    latent, rope          cache [blocks, 1, SIZE, L] and [blocks, 1, SIZE, 2 HALF], outputs
    scales                of the codes of latents in a cache of rows, output; None: another cache
    latent_block, rope_block   elements from block to block
    LATENT_TOKEN, ROPE_TOKEN   elements from token to token
    inverse               1 / scale of all codes of an 8-bit cache, else None
    kv_slots              [T] int64: block * SIZE + offset
    HALF, HALFP           half the width of the rotated part; padded to a power of two
    L, LP                 width of the latent; padded to a power of two
    TURNED                heads of q that a program rotates
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col, dims = tl.arange(0, HALFP)[None, :], tl.arange(0, LP)
    angle, inside = token * (2 * HALF) + col, col < HALF
    if part == 0:
        scale = tl.load(norm + dims, mask=dims < L, other=0.0).to(tl.float32)
        slot = tl.load(kv_slots + token)
        block, offset = (slot // SIZE).to(tl.int64), slot % SIZE
        given = tl.load(kv + token * stride_kv + dims, mask=dims < L, other=0.0).to(tl.float32)
        normed = given * tl.rsqrt(tl.sum(given * given, 0) / L + eps) * scale
        to_latent = latent + block * latent_block + offset * LATENT_TOKEN
        if scales is not None:
            to_scales = scales + block * (latent_block // 4) + offset * (LATENT_TOKEN // 4)
            store_latent(finite(normed.to(q.dtype.element_ty), 1e18), to_latent, to_scales, L, LP)
        elif inverse is None:
            normed = finite(normed.to(latent.dtype.element_ty), 1e18)  # keys and values made of it must be finite, too
            tl.store(to_latent + dims, normed, mask=dims < L)
        else:
            normed = coded(finite(normed.to(q.dtype.element_ty)), inverse, latent.dtype.element_ty)
            tl.store(to_latent + dims, normed, mask=dims < L)
        _turn(
            kv + token * stride_kv + L + col,
            rope + block * rope_block + offset * ROPE_TOKEN + col,
            cos + angle,
            sin + angle,
            inside,
            inside,
            inverse,
            HALF,
        )
    else:
        head = (part - 1) * TURNED + tl.arange(0, TURNED)[:, None]
        pairs = q + token * stride_q + head * WIDTH + (WIDTH - 2 * HALF) + col
        _turn(pairs, pairs, cos + angle, sin + angle, inside, inside & (head < HEADS), None, HALF)


@jit
def _turn(given, to, cos, sin, known, inside, inverse, HALF: tl.constexpr):
    """Rotate rows of 2 HALF elements: `given` and `to` point to the elements of their first halves.

    cos, sin        pointers to the same columns;  known  mask of the columns;  inside  mask of the elements
    inverse         1 / scale of the codes that are stored; None: numbers are stored
    """
    first = tl.load(given, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(given + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos, mask=known, other=0.0).to(tl.float32)
    s = tl.load(sin + HALF, mask=known, other=0.0).to(tl.float32)
    if inverse is None:
        tl.store(to, (first * c - second * s).to(to.dtype.element_ty), mask=inside)
        tl.store(to + HALF, (second * c + first * s).to(to.dtype.element_ty), mask=inside)
    else:
        left = (first * c - second * s).to(given.dtype.element_ty)
        right = (second * c + first * s).to(given.dtype.element_ty)
        tl.store(to, coded(left, inverse, to.dtype.element_ty), mask=inside)
        tl.store(to + HALF, coded(right, inverse, to.dtype.element_ty), mask=inside)


def absorbed(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentView,
    meta: AttentionMeta,
    scale: float,
    lse: Tensor | None = None,
) -> Tensor:
    """Return softmax-weighted sums of latents [T, H, L]; fast for few query rows. See `quire.kernels.latent`."""
    tokens, heads, dim = q_latent.shape
    check_queries(q_latent, q_rope)
    if meta.row_positions is not None:
        meta = replace(meta, decode_len=1)  # a single row, wherever it is, has its context divided among programs
    out = torch.empty_like(q_latent)
    group, few, many = configure(q_latent, cache, meta)
    prefix = (many[0], many[4], PREFIX_PARTS)
    shape = Shape(heads, group, dim, cache.block_size, 0, few[1], many[0], few[4], PARTS, prefix)
    plan = plan_step(meta, shape, tokens)
    groups, rows, shared = heads // group, plan.limit * group, plan.shared
    in_pdl = pdl.in_use()
    sizes = {"L": dim, "LP": padded(dim), "GROUP": group, "ROWS": rows, "HEADS": groups, "PDL": in_pdl}
    sizes |= pdl.options(in_pdl)
    given = {
        "EXACT": EXACT.get(q_latent.dtype, "tf32"),
        "SIZE": cache.block_size,
        "R": q_rope.shape[2],
        "RP": padded(q_rope.shape[2]),
        "LATENT_TOKEN": cache.latent.stride(2),
        "ROPE_TOKEN": cache.rope.stride(2),
        **sizes,
    }
    numbers = (
        q_latent.stride(0),
        *q_rope.stride()[:2],
        cache.latent.stride(0),
        cache.rope.stride(0),
        meta.block_tables.stride(0),
        scale * cache.scale * LOG2E,
        _common_scale(cache),
    )
    if shared is not None and len(plan.items):
        lanes, keys, warps, stages, _ = many
        count, num_seqs = len(shared.starts) - 1, len(meta.seq_lens)
        shared_kernel[(len(shared.members) * rows // lanes + count, groups, plan.prefix_parts)](
            q_latent,
            q_rope,
            cache.latent,
            cache.rope,
            cache.scales,
            meta.block_tables,
            meta.table_rows,
            meta.query_start,
            meta.seq_lens,
            shared.starts,
            shared.members,
            shared.blocks,
            plan.sums,
            plan.stats,
            count,
            num_seqs,
            len(plan.items),
            plan.prefix_parts,
            *numbers,
            TILE=keys,
            M=lanes,
            WIDTH=padded(count),
            num_warps=warps,
            num_stages=stages,
            **given,
        )
    for records, words, cut in ((plan.items, ITEM_WORDS, few), (plan.tiles, TILE_WORDS, many)):
        lanes, keys, warps, stages, _ = cut
        if len(records):
            absorbed_kernel[(len(records) * groups,)](
                q_latent,
                q_rope,
                out,
                cache.latent,
                cache.rope,
                cache.scales,
                meta.block_tables,
                records,
                plan.sums,
                plan.stats,
                lse,
                meta.row_positions,
                *numbers,
                DECODES=cut is few,
                TILE=keys,
                M=lanes,
                WORDS=words,
                SHARED=shared is not None,
                num_warps=warps,
                num_stages=stages,
                **given,
            )
    if len(plan.items):
        alone = len(meta.seq_lens) * groups * rows <= 2 * multiprocessors()  # a program for every lane
        lanes = 1 if alone else 1 << min(2, (rows - 1).bit_length())
        work = len(meta.seq_lens) * groups * -(-rows // lanes)
        merge_kernel[(min(work, MERGING * multiprocessors()),)](
            out,
            plan.items,
            plan.sums,
            plan.stats,
            lse,
            len(meta.seq_lens),
            out.stride(0),
            LANES=lanes,
            WORDS=ITEM_WORDS,
            PARTS=PARTS if shared is None else 2 * PARTS,
            SHARED=shared is not None,
            num_warps=4,
            **sizes,
        )
    return out


def chosen(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentView,
    meta: AttentionMeta,
    scale: float,
    positions: Tensor,
    first: int = 0,
) -> Tensor:
    """Return softmax-weighted sums of the latents at `positions` [T, H, L]. See `quire.kernels.latent`."""
    tokens, heads, dim = q_latent.shape
    check_queries(q_latent, q_rope)
    assert positions.is_contiguous()
    out = torch.empty_like(q_latent)
    if not tokens:
        return out
    group, (lanes, keys, warps, stages, _), _ = configure(q_latent, cache, replace(meta, decode_len=1))
    work, top_k = tokens * heads // group, positions.shape[1]
    most = min(MOST_PARTS, -(-top_k // keys), -(-PROGRAMS * multiprocessors() // work))
    span = -(-top_k // (most * keys)) * keys
    parts, places, in_pdl = -(-top_k // span), places_of(meta, len(meta.kv_slots))[first:], pdl.in_use()
    floats = {"dtype": torch.float32, "device": q_latent.device}
    state = (torch.empty(work * parts * lanes, size, **floats) for size in (dim, 2)) if parts > 1 else (None, None)
    sizes = {"L": dim, "LP": padded(dim), "GROUP": group, "M": lanes, "HEADS": heads // group, "PARTS": parts}
    sizes |= {"PDL": in_pdl, **pdl.options(in_pdl)}
    sums, stats = state
    common, table = _common_scale(cache), meta.block_tables
    rows = range(first, first + tokens)
    if (plain := plain_contexts(cache, meta, rows, top_k, q_latent.dtype, WORKSPACE)) is not None:
        cache, table = plain
    slots = slots_of(positions, places, table, cache.block_size)
    chosen_kernel[(work, parts)](
        q_latent,
        q_rope,
        out,
        cache.latent,
        cache.rope,
        cache.scales,
        places,
        slots,
        sums,
        stats,
        q_latent.stride(0),
        *q_rope.stride()[:2],
        cache.latent.stride(0),
        cache.rope.stride(0),
        scale * cache.scale * LOG2E,
        common,
        top_k,
        span,
        EXACT=EXACT.get(q_latent.dtype, "tf32"),
        SIZE=cache.block_size,
        TILE=keys,
        R=q_rope.shape[2],
        RP=padded(q_rope.shape[2]),
        LATENT_TOKEN=cache.latent.stride(2),
        ROPE_TOKEN=cache.rope.stride(2),
        num_warps=warps,
        num_stages=stages,
        **sizes,
    )
    if parts > 1:
        join_kernel[(work, group)](
            out, places, sums, stats, out.stride(0), PADDED=1 << (parts - 1).bit_length(), num_warps=8, **sizes
        )
    return out


def slots_of(positions: Tensor, places: Tensor, table: Tensor, block_size: int) -> Tensor:
    """Return the slots in the cache of chosen tokens, [T, K] int32. places: of the rows, see `places_of`"""
    (tokens, top_k), in_pdl = positions.shape, pdl.in_use()
    slots = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
    slots_kernel[(tokens, -(-top_k // 256))](
        positions,
        places,
        table,
        slots,
        table.stride(0),
        top_k,
        SIZE=block_size,
        BLOCK=256,
        PDL=in_pdl,
        num_warps=4,
        **pdl.options(in_pdl),
    )
    return slots


def configure(q: Tensor, cache: LatentView, meta: AttentionMeta) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Choose the tilings of `absorbed`. Return the number of heads of a program, and two tilings.

    A tiling is (lanes of a program, keys of an iteration, warps, stages, programs of a multiprocessor); a lane is a
    pair (row, head). The first is for sequences of few rows (decodes), the second for sequences of many rows. The
    tiles of a cache of codes are in shared memory as codes and as numbers: ALONE would leave room for one program.
    """
    room = shared_memory() // (4 * padded(q.shape[2]))  # a program's sums pass through shared memory at its end
    limit, most = max(1, meta.decode_len), min(128 // q.element_size(), 1 << room.bit_length() - 1)  # lanes
    group = max((d for d in range(1, most + 1) if q.shape[1] % d == 0 and d * limit <= most), default=1)
    width = q.element_size() * (padded(q.shape[2]) + padded(cache.rope.shape[3]))

    def fit(lanes: int) -> tuple[int, ...]:
        alone = lanes == 16 and len(q) <= 8 and not is_coded(cache.latent)
        keys, warps, stages, programs = ALONE if alone else CUTS[min(64, lanes)]
        left = shared_memory() // width - lanes
        keys = max(16, min(keys * 2 // q.element_size(), 1 << max(left, 1).bit_length() - 1))
        return lanes, keys, warps, max(1, min(stages, left // keys + (lanes < 64))), programs

    return group, fit(padded(group * limit)), fit(most)


def expanded(q: Tensor, kv_up: Tensor, cache: LatentView, meta: AttentionMeta, scale: float, out: Tensor) -> Tensor:
    """Compute attention of `meta.prompts` with keys and values made from the latents; return `out`.

    See `quire.kernels.latent`.
    """
    (heads, width, _), turned, value = kv_up.shape, cache.rope.shape[3], out.shape[2]
    check_expanded(q, kv_up, out)
    assert meta.prompts is not None
    sizes = {"P": width - value, "PP": padded(width - value), "R": turned, "RP": padded(turned)}
    keys, values = sizes["PP"] + sizes["RP"], padded(value)
    rows, tile, warps, stages = next(
        cut for cut in MANY if q.element_size() * (cut[0] * keys + cut[3] * cut[1] * (keys + values)) < shared_memory()
    )
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
    for tiles, *tokens in cut_prompts(meta, cache.block_size, rows, most(kv_up)):
        made, ropes = workspace(kv_up, cache, *tokens)
        expanded_kernel[(len(tiles), heads)](
            q,
            made,
            ropes,
            out,
            lse,
            tiles,
            meta.row_positions,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            scale * LOG2E,
            EXACT=EXACT.get(q.dtype, "tf32"),
            HEADS=heads,
            V=value,
            VP=values,
            M=rows,
            TILE=tile,
            WORDS=TILE_WORDS,
            num_warps=warps,
            num_stages=stages,
            **sizes,
        )
        del made, ropes  # or two pieces would be there at once
    return out


def most(kv_up: Tensor) -> int:
    """Return the largest number of tokens whose keys and values `expanded` makes at a time, a multiple of STEP."""
    return max(STEP, WORKSPACE // (kv_up.shape[0] * kv_up.shape[1] * kv_up.element_size()) // STEP * STEP)


def _common_scale(cache: LatentView) -> float | None:
    """Return the scale of all codes of an 8-bit cache; None: it holds numbers, or codes with scales of their own."""
    return cache.scale if is_coded(cache.latent) and cache.scales is None else None
