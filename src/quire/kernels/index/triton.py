"""The indexer of sparse latent attention on NVIDIA GPUs: the launches, and the kernel that fills its cache.

    triton_scores   scores of rows for all tokens before them, in a buffer of bounded size
    triton_select   the positions of the best ones

Rows are taken in pieces whose scores fit the buffer. The host reads nothing from the device: steps without
`meta.prompts` can be captured. Tuned for 32 or 64 heads of 128 numbers; correct for other sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention import AttentionMeta, Prompt
from quire.kernels.attention.triton_contexts import context_blocks, count_blocks
from quire.kernels.attention.triton_tiles import coded, finite
from quire.kernels.index import Chosen, IndexView
from quire.kernels.index.triton_places import places_of
from quire.kernels.index.triton_scores import score_kernel
from quire.kernels.index.triton_select import BINS, LEVELS, WHOLE, level_kernel, whole_kernel, write_kernel
from quire.kernels.triton_runtime import jit, tl

__all__ = ["choose", "keep_last", "prepare", "reuse", "room"]

SCORES = 128 << 20  # bytes of scores at a time
ALIGNED = 1024  # a row of scores has a multiple of so many: kernels are compiled for that
SPAN = 1024  # tokens of a context that a program scores for a decode
# Tokens of a product, warps, products in flight: where programs of decodes fill the GPU several times, and elsewhere.
MANY, FEW = (64, 4, 3), (128, 8, 3)
FULL = 1024  # programs from which on there are many
# Of prompts; two programs fit a multiprocessor, so that one's sums over heads run beside the other's products.
PROMPT, PROMPT_SPAN = (64, 4, 2), 4096
TOGETHER = 8  # rows of a prompt that a program scores together, at most
ROWS = 64  # mean rows of a prompt from which on its keys are made of codes once
NUMBERS = 128 << 20  # bytes of these keys, at most
LANES = 256  # most pairs of a row and a head in a product
# Tokens that a program of a selection takes, and its warps: where many programs fill the GPU, and elsewhere.
SPLIT_MANY, SPLIT_FEW = (8192, 8), (1024, 4)
WHOLE_TILE, WHOLE_WARPS = 8192, 16  # of a selection by programs with whole contexts
EXACT = {torch.float32: "ieee"}  # precision of products of float32


def prepare(
    q: Tensor, k: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, cache: IndexView, kv_slots: Tensor
) -> Tensor:
    """Rotate q in place; write normalized, rotated keys to the cache; return q. See `quire.kernels.index`."""
    tokens, heads, dim = q.shape
    if q.stride()[1:] != (dim, 1) or k.stride(1) != 1 or cache.keys.stride()[2:] != (dim, 1):
        raise ValueError(
            "index: q, k and the cache must be contiguous inside a token; the strides of q, k and keys are "
            f"{q.stride()}, {k.stride()}, {cache.keys.stride()}"
        )
    if tokens:
        in_pdl = pdl.in_use()
        _prepare_kernel[(tokens,)](
            q,
            k,
            norm.contiguous(),
            cos,
            sin,
            cache.keys,
            cache.scales,
            kv_slots,
            q.stride(0),
            k.stride(0),
            cache.keys.stride(0),
            0 if cache.scales is None else cache.scales.stride(0),
            eps,
            HEADS=heads,
            HEADSP=_power(heads),
            D=dim,
            DP=_power(dim),
            HALF=cos.shape[1] // 2,
            SIZE=cache.block_size,
            PDL=in_pdl,
            num_warps=4,
            **pdl.options(in_pdl),
        )
    return q


@jit
def _prepare_kernel(
    q,
    k,
    norm,
    cos,
    sin,
    keys,
    scales,
    kv_slots,
    stride_q,
    stride_k,
    keys_block,
    scales_block,
    eps,
    HEADS: tl.constexpr,
    HEADSP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Fill the cache with the key of a token, and rotate its queries. Grid (tokens,).

    q, k        [T, HEADS, D], rotated in place, and [T, D]; stride_q, stride_k  elements from token to token
    norm, eps   [2, D] weight and bias of the norm of keys, and its epsilon
    cos, sin    [T, 2 HALF] contiguous; sin is signed
    keys, scales   cache [blocks, 1, SIZE, D] and [blocks, 1, SIZE, 1] or None, outputs; keys_block, scales_block
                elements from block to block
    kv_slots    [T] int64: block * SIZE + offset
    DP, HEADSP  D and HEADS, padded to powers of two
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, dims, head = tl.program_id(0).to(tl.int64), tl.arange(0, DP), tl.arange(0, HEADSP)
    inside, turned = dims < D, dims < 2 * HALF
    other = tl.where(dims < HALF, dims + HALF, dims - HALF)  # the number with which one is rotated
    c = tl.load(cos + token * (2 * HALF) + dims, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + token * (2 * HALF) + dims, mask=turned, other=0.0).to(tl.float32)
    given = k + token * stride_k
    x = tl.load(given + dims, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / D
    rest = tl.where(inside, x - mean, 0.0)
    root = tl.rsqrt(tl.sum(rest * rest, 0) / D + eps)
    own = rest * root * tl.load(norm + dims, mask=inside, other=0.0).to(tl.float32)
    own = (own + tl.load(norm + D + dims, mask=inside, other=0.0).to(tl.float32)).to(k.dtype.element_ty)
    twin = (tl.load(given + other, mask=turned, other=0.0).to(tl.float32) - mean) * root
    twin *= tl.load(norm + other, mask=turned, other=0.0).to(tl.float32)
    twin = (twin + tl.load(norm + D + other, mask=turned, other=0.0).to(tl.float32)).to(k.dtype.element_ty)
    key = finite((own.to(tl.float32) * c + twin.to(tl.float32) * s).to(k.dtype.element_ty))
    slot = tl.load(kv_slots + token)
    block, offset = slot // SIZE, slot % SIZE
    at = keys + block * keys_block + offset * D + dims
    if scales is None:
        tl.store(at, key.to(keys.dtype.element_ty), mask=inside)
    else:
        largest = tl.maximum(tl.max(tl.abs(tl.where(inside, key.to(tl.float32), 0.0)), 0), 1e-4)
        scale = tl.exp2(tl.ceil(tl.log2(largest / (448.0 if keys.dtype.element_ty == tl.float8e4nv else 57344.0))))
        tl.store(at, coded(key, 1.0 / scale, keys.dtype.element_ty), mask=inside)
        tl.store(scales + block * scales_block + offset, scale)
    pairs, known = q + token * stride_q + head[:, None] * D, (head < HEADS)[:, None] & turned[None, :]
    one = tl.load(pairs + dims[None, :], mask=known, other=0.0).to(tl.float32)
    two = tl.load(pairs + other[None, :], mask=known, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all have read what they rotate
    tl.store(pairs + dims[None, :], (one * c[None, :] + two * s[None, :]).to(q.dtype.element_ty), mask=known)


class ScoredPart(NamedTuple):
    """Rows first .. last - 1 of a step, and an upper bound of the tokens that they score.

    alone   False: they are rows of one sequence
    """

    first: int
    last: int
    tokens: int
    alone: bool


def room(rows: int, meta: AttentionMeta, top_k: int, device: torch.device) -> Chosen:
    """Return the rows that choose, and memory for their choice: decodes and long prompts. See `quire.kernels.index`."""
    assert meta.row_positions is None and meta.prompts is not None, "a worker of a GPU tells its prompts"
    decodes = meta.prompts[0][0] if meta.prompts else rows
    long = tuple(one for one in meta.prompts if one[3] + one[1] - one[0] > top_k)
    count = decodes + sum(last - first for first, last, *_ in long)
    return Chosen(long, torch.empty(count, top_k, dtype=torch.int32, device=device), decodes)


def choose(q: Tensor, weights: Tensor, cache: IndexView, meta: AttentionMeta, top_k: int) -> Chosen:
    """Return the best tokens of each row. See `quire.kernels.index`."""
    chosen = room(len(q), meta, top_k, q.device)
    if len(chosen.positions):
        at, places, table = 0, places_of(meta, len(q)), meta.block_tables
        for piece in _pieces(meta, chosen.decodes or 0, chosen.sequences, cache.block_size):
            count = piece.last - piece.first
            if not piece.alone and table is meta.block_tables:
                cache, table = _plain(cache, meta, chosen.sequences, q.dtype)
            _choose_piece(q, weights, cache, table, piece, places, chosen.positions[at : at + count])
            at += count
    return chosen


def keep_last(chosen: Chosen, meta: AttentionMeta) -> Tensor:
    """Return the tokens of each sequence's last row. See `quire.kernels.index`.

    `choose` writes fewer than `top_k` tokens for a row with fewer before it, and later rows of it have more.
    """
    assert isinstance(meta.query_start, Tensor) and isinstance(meta.seq_lens, Tensor) and not chosen.sequences
    top_k, device = chosen.positions.shape[1], chosen.positions.device
    rows = (meta.query_start[1:].long() - 1).clamp_(min=0)
    first = torch.arange(top_k, dtype=torch.int32, device=device)
    return torch.where(meta.seq_lens[:, None] > top_k, chosen.positions[rows], first)


def reuse(kept: Tensor, meta: AttentionMeta) -> Chosen:
    """Return the tokens of one row of each sequence, which are a step's decodes. See `quire.kernels.index`."""
    assert isinstance(meta.seq_lens, Tensor)
    return Chosen((), kept.masked_fill(kept >= meta.seq_lens[:, None], -1), len(kept))


def _plain(
    cache: IndexView, meta: AttentionMeta, prompts: tuple[Prompt, ...], dtype: torch.dtype
) -> tuple[IndexView, Tensor]:
    """Return a cache of numbers with the keys of some prompts, and its block table: those given where it gains nothing.

    The scales are powers of two, so that bfloat16 holds the numbers of all codes, and scores have the same bits.
    `NUMBERS` bytes are allocated where some are needed, so that a step with short contexts measures the memory of all.
    """
    counts, room = count_blocks(prompts, cache.block_size), NUMBERS // dtype.itemsize
    pairs = sum((prompt[1] - prompt[0]) * count for prompt, count in zip(prompts, counts, strict=True))
    shape = sum(counts), *cache.keys.shape[1:]
    if cache.scales is None or dtype == torch.float16 or pairs < ROWS * sum(counts) or prod(shape) > room:
        return cache, meta.block_tables
    blocks, table = context_blocks(meta, prompts, cache.block_size)
    codes = cache.keys.view(torch.uint8)[blocks].view(cache.keys.dtype)
    numbers = torch.empty(room, dtype=dtype, device=codes.device)[: prod(shape)].view(shape)
    return IndexView(numbers.copy_(codes).mul_(cache.scales[blocks])), table


def _pieces(meta: AttentionMeta, decodes: int, long: tuple[Prompt, ...], size: int) -> Iterator[ScoredPart]:
    """Yield pieces whose scores fit the buffer: first decodes, then prompts."""
    width = meta.block_tables.shape[1] * size
    step = max(1, SCORES // (4 * width))
    for first in range(0, decodes, step):
        yield ScoredPart(first, min(first + step, decodes), width, True)
    for begin, end, _, past in long:
        first = begin
        while first < end:
            # of the most tokens that rows of this piece may have
            step = max(TOGETHER, SCORES // (4 * (past + end - begin)) // TOGETHER * TOGETHER)
            last = min(first + step, end)
            yield ScoredPart(first, last, past + last - begin, False)
            first = last


def _choose_piece(
    q: Tensor,
    weights: Tensor,
    cache: IndexView,
    table: Tensor,
    piece: ScoredPart,
    places: Tensor,
    positions: Tensor,
) -> None:
    """Write the best tokens of the rows of a piece to `positions`."""
    (_, heads, dim), count, in_pdl = q.shape, piece.last - piece.first, pdl.in_use()
    width = -(-piece.tokens // ALIGNED) * ALIGNED
    scores = torch.empty(count, width, dtype=torch.float32, device=q.device)
    bins = None if width <= WHOLE else torch.empty(count, LEVELS, BINS, dtype=torch.int32, device=q.device)
    own, padded = places[piece.first :], _power(heads)
    together = 1 if piece.alone else max(1, min(TOGETHER, LANES // padded))
    span = SPAN if piece.alone else PROMPT_SPAN
    spans = -(-piece.tokens // span)
    keys, warps, stages = PROMPT if not piece.alone else MANY if spans * count >= FULL else FEW
    score_kernel[(spans, -(-count // together))](
        q[piece.first :],
        weights[piece.first :],
        cache.keys,
        cache.scales,
        table,
        own,
        scores,
        bins,
        q.stride(0),
        weights.stride(0),
        cache.keys.stride(0),
        0 if cache.scales is None else cache.scales.stride(0),
        table.stride(0),
        width,
        count,
        positions.shape[1],
        HEADS=heads,
        HEADSP=padded,
        D=dim,
        DP=_power(dim),
        SIZE=cache.block_size,
        SPAN=span,
        KEYS=keys if q.element_size() < 4 else keys // 4,
        TOGETHER=together,
        BINS=LEVELS * BINS,
        EXACT=EXACT.get(q.dtype, "tf32"),
        PDL=in_pdl,
        num_warps=warps,
        num_stages=stages if q.element_size() < 4 else 1,
        **pdl.options(in_pdl),
    )
    _select(scores, own, bins, positions)


def _select(scores: Tensor, places: Tensor, bins: Tensor | None, positions: Tensor) -> None:
    """Write the positions of the best scores of each row. bins: see `level_kernel`; None: a program takes a context."""
    (count, tokens), top_k, in_pdl = scores.shape, positions.shape[1], pdl.in_use()
    launch = {"PDL": in_pdl, **pdl.options(in_pdl)}
    if bins is None:
        sizes = {"TOP": _power(top_k), "WHOLE": WHOLE, "TILE": WHOLE_TILE, "num_warps": WHOLE_WARPS}
        whole_kernel[(count,)](scores, places, positions, tokens, top_k, **sizes, **launch)
        return
    split, warps = SPLIT_MANY if -(-tokens // SPLIT_MANY[0]) * count >= FULL else SPLIT_FEW
    splits = -(-tokens // split)
    counts = torch.empty(count, 2, splits, BINS, dtype=torch.int32, device=scores.device)
    sizes = {"LEVELS": LEVELS, "BINS": BINS, "SPLIT": split, "num_warps": warps, **launch}
    for level in range(LEVELS):
        level_kernel[(splits, count)](scores, places, bins, counts, tokens, top_k, LEVEL=level, **sizes)
    write_kernel[(splits, count)](
        scores, places, bins, counts, positions, tokens, top_k, SPLITS=_power(splits), TOP=_power(top_k), **sizes
    )


def _power(value: int) -> int:
    return max(16, 1 << (value - 1).bit_length())
