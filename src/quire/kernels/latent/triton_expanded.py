"""Latent attention of many rows: keys and values are made of the latents, a bounded piece of all contexts at a time.

The host knows the rows and contexts of prompts. It puts pieces of contexts side by side into a workspace, and cuts rows
into tiles. A tile attends to the piece of its context in the workspace; its state (output and log-sum-exp) is kept from
piece to piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention import AttentionMeta
from quire.kernels.attention.eight_bits import is_coded
from quire.kernels.attention.triton_plan import TILE_WORDS
from quire.kernels.attention.triton_tiles import LOWEST, accumulate, finite, load_queries, load_tile, rescore
from quire.kernels.host_copies import sent_array
from quire.kernels.latent import LatentView
from quire.kernels.latent.triton_rows import widen
from quire.kernels.triton_runtime import jit, tl

STEP = 128  # tokens: contexts are cut at multiples of it, and a workspace ends with so many unused tokens


Piece = tuple[Tensor, Tensor, Tensor]  # tiles; block and offset in the cache of each token of the workspace


def cut_prompts(meta: AttentionMeta, block_size: int, rows: int, most: int) -> list[Piece]:
    """Cut the contexts of the step's prompts into pieces of at most `most` >= STEP tokens, and their rows into tiles.

    Returns for each piece (tiles, blocks, offsets). `meta.plans` keeps the result for other layers. One copy brings it
    to the device; the host does not wait for the copy. A workspace holds the expanded keys and values of a piece.
    If rows have positions of their own, which only the device knows, word 2 is an upper bound of the first one's.

    rows              rows of a tile
    tiles             [m, TILE_WORDS] int32, the longest first, words: 0 first row, 1 rows, 2 position of the first row,
                      3 index in the workspace of its sequence's first token there, 4 position of that token,
                      5 number of its sequence's tokens there, 6 number of tiles
    blocks, offsets   [n] int64: block and offset in the cache of each token of the workspace
    """
    known = meta.plans.get((block_size, rows, most))
    if isinstance(known, list):
        return known
    cuts: list[tuple[list[Any], list[Any]]] = []
    place = most
    for first, last, sequence, past in meta.prompts or ():
        start, length = 0, past + last - first
        while start < length:
            if place + STEP > most:
                cuts.append(([], []))
                place = 0
            end = min(length, start + (most - place) // STEP * STEP)
            cuts[-1][0].extend(
                [row, min(rows, last - row), past + row - first, place, start, end - start, *[0] * (TILE_WORDS - 6)]
                for row in range(first, last, rows)
                if past + min(row + rows, last) - first > start
            )
            cuts[-1][1].append(np.stack((np.full(end - start, sequence, np.int32), np.arange(start, end))))
            place, start = place + end - start, end
    lists = []
    for tiles, spans in cuts:
        tiles.sort(key=lambda tile: tile[4] - min(tile[4] + tile[5], tile[2] + tile[1]))
        tokens = np.concatenate(spans, 1)
        tokens = np.pad(tokens, ((0, 0), (0, STEP + tokens.shape[1] % 2)), "edge")  # whole 16 bytes
        lists += [np.array(tiles, np.int32), tokens.astype(np.int32)]
        lists[-2][:, 6] = len(tiles)
    packed = sent_array(np.concatenate([words.ravel() for words in lists]), meta.block_tables.device)
    views = packed.split([words.size for words in lists])
    pieces: list[Piece] = []
    for tiles, tokens in zip(views[::2], views[1::2], strict=True):
        index, position = tokens.view(2, -1).long()
        index = index if meta.table_rows is None else meta.table_rows[index].long()
        blocks = meta.block_tables[index, position // block_size].long()
        pieces.append((tiles.view(-1, TILE_WORDS), blocks, position % block_size))
    meta.plans[block_size, rows, most] = pieces
    return pieces


def workspace(kv_up: Tensor, cache: LatentView, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the expanded keys and values [n, H (P + V)] of n tokens of the cache, and their rotated keys [n, R].

    blocks, offsets   [n] int64: block of each token in the cache, and its offset in the block
    """
    if cache.scales is not None:
        latents, ropes = widen(cache, blocks, offsets, kv_up.dtype)
        return F.linear(latents, kv_up.flatten(0, 1)), ropes
    latents, ropes = (_gather(side, blocks, offsets) for side in (cache.latent, cache.rope))
    if is_coded(cache.latent):
        latents, ropes = (side.to(kv_up.dtype).mul_(cache.scale) for side in (latents, ropes))
    return F.linear(latents, kv_up.flatten(0, 1)), ropes


def _gather(side: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    """Gather tokens of a cache. One index, if a page is a whole number of rows: two are slower in PyTorch."""
    if is_coded(side):
        wide = torch.int64 if _divides(side, 8) else torch.uint8
        return _gather(side.view(wide), blocks, offsets).view(side.dtype)
    (count, _, size, width), (step, rest) = side.shape, divmod(side.stride(0), side.shape[3])
    table = side.as_strided(((count - 1) * step + size, width), (width, 1))
    return side[blocks, 0, offsets] if rest else F.embedding(torch.add(offsets, blocks, alpha=step), table)


def _divides(side: Tensor, items: int) -> bool:
    """True where a cache can be viewed in elements of `items` of its own."""
    return not any(number % items for number in (side.shape[3], side.storage_offset(), *side.stride()[:3]))


@jit
def expanded_kernel(
    q,
    made,
    ropes,
    out,
    lse,
    tiles,
    row_positions,
    stride_q,
    stride_head,
    stride_out,
    scale,
    EXACT: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Compute attention of a tile of rows over a piece of the context; merge it into `out`. Grid (tiles, HEADS).

    q                   [T, HEADS, P + R]
    stride_q, stride_out, stride_head   elements from row to row of q, of out; from head to head of q
    made, ropes         workspace [n, HEADS, P + V] (unrotated keys, then values) and [n, R]
    out, lse            [T, HEADS, V] and [T, HEADS] float32 (base 2): state after earlier pieces, and output
    tiles               [m, WORDS] int32, see `cut_prompts`
    row_positions       [T] int64 position of each row; None: the rows of a tile are at consecutive positions
    scale, EXACT        softmax scale * log2(e); precision of float32 products
    P, R, V, PP, RP, VP widths, see `quire.kernels.latent`; padded to powers of two
    M, TILE             rows of a tile; keys of an iteration
    """
    head, record = tl.program_id(1), tiles + tl.program_id(0) * WORDS
    row, num_rows, position = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    place, start, count = tl.load(record + 3).to(tl.int64), tl.load(record + 4), tl.load(record + 5)
    lane, dims = tl.arange(0, M), tl.arange(0, VP)
    live, rows = lane < num_rows, row + lane
    plain = load_queries(q + head * stride_head, rows, lane * 0, live, stride_q, P, PP)
    turned = load_queries(q + head * stride_head + P, rows, lane * 0, live, stride_q, R, RP)
    to_lse = lse + rows.to(tl.int64) * HEADS + head
    to_out = out + rows.to(tl.int64)[:, None] * stride_out + (head * V + dims)[None, :]
    inside, begun = live[:, None] & (dims < V)[None, :], live & (start > 0)
    top = tl.load(to_lse, mask=begun, other=LOWEST)
    weight = begun.to(tl.float32)
    sums = tl.load(to_out, mask=inside & (start > 0), other=0.0).to(tl.float32)
    # Positions are counted from the sequence's first token in the workspace.
    if row_positions is None:
        first = position - start
        positions, last = first + lane, first + num_rows
    else:
        own = tl.load(row_positions + rows, mask=live, other=0).to(tl.int32) - start
        first = tl.load(row_positions + row).to(tl.int32) - start
        positions, last = tl.where(live, own, first), tl.max(own, 0) + 1
    whole = tl.minimum(tl.maximum(first + 1, 0), count) // TILE * TILE
    made += head * (P + V)
    WIDE: tl.constexpr = HEADS * (P + V)
    for masked in tl.static_range(2):
        stop = tl.minimum(count, last) if masked else whole
        for at in tl.range(whole if masked else 0, stop, TILE):
            keys = load_tile(made, place, at, stop, WIDE, WIDE, False, 1 << 30, TILE, P, PP)
            short = load_tile(ropes, place, at, stop, R, R, False, 1 << 30, TILE, R, RP)
            values = load_tile(made + P, place, at, stop, WIDE, WIDE, False, 1 << 30, TILE, V, VP)
            if masked:
                values = finite(values)  # the last may be another sequence's: a weight of 0 must make nothing of them
            scores = tl.dot(plain, tl.trans(keys), input_precision=EXACT)
            scores = tl.dot(turned, tl.trans(short), scores, input_precision=EXACT)
            scores, rest = rescore(scores, positions, at, scale, 0.0, masked == 1, 0, False, TILE)
            sums, top, weight = accumulate(scores, rest, values, sums, top, weight, EXACT)
    tl.store(to_out, (sums / weight[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(to_lse, top + tl.log2(weight), mask=live)
