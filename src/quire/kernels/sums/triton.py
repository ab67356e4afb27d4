"""Sums over bytes in Triton, in the memory of a GPU; definition: see `quire.kernels.sums`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.sums.ref import FIRST, GOLDEN, I64, NUMBERS, SECOND, numbers
from quire.kernels.triton_runtime import jit, tl

TILE = 1 << 16  # bytes that a program sums
COLUMNS = 7  # address, number of bytes, then the five of a row
WORD, LANES = 4, 1024  # bytes of a word; loads of a program at a time


def add(spans: Sequence[tuple[int, int, I64]], sums: Tensor) -> None:
    """Add the sums of whole slices to `sums` [., 2] int64, in the order of `spans`, on the current stream.

    spans   (address on the device, number of bytes, row) of each slice
    """
    made = np.array([(address, size, *row.tolist()) for address, size, row in spans], np.int64).reshape(-1, COLUMNS)
    whole = (made[:, :5] % WORD == 0).all(1)
    table = torch.from_numpy(numbers().view(np.int64)).to(sums.device)
    for width, chosen in ((WORD, np.flatnonzero(whole)), (1, np.flatnonzero(~whole))):
        if not len(chosen):
            continue
        own = torch.from_numpy(np.ascontiguousarray(made[chosen])).to(sums.device)
        places = torch.from_numpy(chosen).to(sums.device)
        tiles = -(-int(made[chosen, 1].max()) // TILE)
        _sum_kernel[(max(1, tiles), len(chosen))](
            own, places, table, sums, width, TILE, LANES, NUMBERS, COLUMNS, GOLDEN, FIRST, SECOND, num_warps=4
        )


@jit
def _mixed(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return the finalizer of SplitMix64 of uint64 numbers."""
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@jit
def _sum_kernel(
    spans,
    places,
    table,
    sums,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    NUMBERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Add the two sums of a part of a slice. Grid (tiles of the longest slice, slices), as the second has a limit.

    spans    [slices, COLUMNS] int64: address, bytes, base, length, stride, key_0, key_1
    places   [slices] int64, rows of `sums`
    table    [2, NUMBERS] int64
    sums     [., 2] int64
    WIDTH    bytes that are read at once: 4 where all offsets and lengths are multiples of 4, else 1
    """
    own = spans + tl.program_id(1) * COLUMNS
    address, size = tl.load(own), tl.load(own + 1)
    start = tl.program_id(0).to(tl.int64) * TILE
    if start >= size:
        return
    base, length, stride = tl.load(own + 2), tl.load(own + 3), tl.load(own + 4)
    low_key, high_key = tl.load(own + 5).to(tl.uint64), tl.load(own + 6).to(tl.uint64)
    low, high = tl.zeros([LANES], tl.uint64), tl.zeros([LANES], tl.uint64)
    end = tl.minimum(start + TILE, size)
    for at in range(start, end, LANES * WIDTH):
        position = at + tl.arange(0, LANES).to(tl.int64) * WIDTH
        inside = position < end
        offset = base + position
        if length < size:
            run = position // length
            offset = base + run * stride + position - run * length
        if WIDTH == 4:
            values = tl.load(address.to(tl.pointer_type(tl.uint32)) + position // 4, mask=inside, other=0)
            values = values.to(tl.uint64)
        else:
            values = tl.load(address.to(tl.pointer_type(tl.uint8)) + position, mask=inside, other=0)
            values = values.to(tl.uint64) << ((offset % 4) * 8).to(tl.uint64)
        number = table + (offset // 4) % NUMBERS
        step = (offset // (4 * NUMBERS)).to(tl.uint64) * GOLDEN
        low += values * tl.load(number).to(tl.uint64) * (_mixed(low_key + step, FIRST, SECOND) | 1)
        high += values * tl.load(number + NUMBERS).to(tl.uint64) * (_mixed(high_key + step, FIRST, SECOND) | 1)
    target = sums + tl.load(places + tl.program_id(1)) * 2
    tl.atomic_add(target, tl.sum(low).to(tl.int64))
    tl.atomic_add(target + 1, tl.sum(high).to(tl.int64))
