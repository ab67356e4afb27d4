"""Pairs of a token and one of its experts, grouped by adapter and expert on a GPU, which alone knows the experts."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.experts.triton import _place, _sort
from quire.kernels.linear.gemv import bucket
from quire.kernels.lora import TILE, AdapterRows
from quire.kernels.triton_runtime import jit, tl

BLOCK = 512
MOST_GROUPS = 4096  # combinations of slots and experts that are sorted; with more, each pair is a group by itself


def pair_rows(ids: Tensor, expert_map: Tensor | None, slots: Tensor, num_slots: int, experts: int) -> AdapterRows:
    """Return the pairs of a step, grouped by adapter and expert. See `AdapterRows.top_k`.

    ids, expert_map   as those of `quire.kernels.experts`;  slots  [T] int32, slot of each token's adapter, or -1
    experts           of this rank
    """
    k, pairs, groups, in_pdl = ids.shape[1], ids.numel(), num_slots * experts, pdl.in_use()
    options, kinds = pdl.options(in_pdl), {"dtype": torch.int32, "device": ids.device}
    of_pairs, grid = torch.empty(pairs, **kinds), (-(-pairs // BLOCK),)
    alone = groups > MOST_GROUPS
    tiles = torch.zeros(pairs if alone else pairs // TILE + min(pairs, groups), 3, **kinds)
    _groups_kernel[grid](
        ids, expert_map, slots, of_pairs, tiles, pairs, k, experts, alone, BLOCK, in_pdl, num_warps=4, **options
    )
    if alone:
        return AdapterRows(of_pairs, torch.arange(pairs, **kinds), tiles, top_k=k)
    order, starts = _sort(of_pairs, None, groups)
    width = min(256, max(32, bucket(groups)))
    _tiles_kernel[(-(-groups // width),)](
        starts, tiles, groups, width, TILE, in_pdl, num_warps=4, **pdl.options(in_pdl)
    )
    return AdapterRows(of_pairs, order, tiles, top_k=k)


@jit(do_not_specialize=["pairs"])
def _groups_kernel(
    ids,
    expert_map,
    slots,
    of_pairs,
    tiles,
    pairs,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the group of each pair to of_pairs [pairs], -1: none. ALONE: also its tile. Grid (ceil(pairs / BLOCK),)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = _place(ids, expert_map, pair, pair < pairs)
    slot = tl.load(slots + pair // TOP_K, mask=pair < pairs, other=-1)
    group = tl.where((place >= 0) & (slot >= 0), slot * EXPERTS + place, -1)
    tl.store(of_pairs + pair, group, mask=pair < pairs)
    if ALONE:
        there = (group >= 0) & (pair < pairs)
        tl.store(tiles + pair * 3, group, mask=there)
        tl.store(tiles + pair * 3 + 1, pair, mask=there)
        tl.store(tiles + pair * 3 + 2, 1, mask=there)


@jit
def _tiles_kernel(starts, tiles, GROUPS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """Write the tiles of the groups, in their order. Grid (ceil(GROUPS / WIDTH),).

    starts   [GROUPS + 1] int32, first pair of each group in the sorted order
    tiles    [most, 3] int32, output: group, first pair, pairs; what is not written is zero
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lane, before = tl.arange(0, WIDTH), 0
    for top in range(0, tl.program_id(0) * WIDTH, WIDTH):
        size = tl.load(starts + top + lane + 1) - tl.load(starts + top + lane)
        before += tl.sum((size + TILE - 1) // TILE, 0)
    group = tl.program_id(0) * WIDTH + lane
    start = tl.load(starts + group, mask=group < GROUPS, other=0)
    size = tl.load(starts + group + 1, mask=group < GROUPS, other=0) - start
    count = (size + TILE - 1) // TILE
    at = tiles + (before + tl.cumsum(count, 0) - count) * 3
    for turn in range(0, tl.max(count, 0)):
        tl.store(at + turn * 3, group, mask=turn < count)
        tl.store(at + turn * 3 + 1, start + turn * TILE, mask=turn < count)
        tl.store(at + turn * 3 + 2, tl.minimum(size - turn * TILE, TILE), mask=turn < count)
