"""Sums over bytes in numpy; definition: see `quire.kernels.sums`. It sums about 1 GB/s."""

import ctypes
import functools

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
NUMBERS, BLOCK = 1024, 4096  # numbers of A; bytes of a tensor that share a number of B
MOST_BYTES = 1 << 18  # that are summed at a time: they stay in the cache
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: U64) -> U64:
    """Return the finalizer of SplitMix64 of each number."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND)
    return x ^ (x >> np.uint64(31))


@functools.cache
def numbers() -> U64:
    """Return A [2, NUMBERS], below 2**32."""
    return (mix(np.arange(1, 2 * NUMBERS + 1, dtype=np.uint64) * np.uint64(GOLDEN)) >> np.uint64(32)).reshape(2, -1)


def add(address: int, num_bytes: int, position: int, row: I64) -> tuple[int, int]:
    """Return the two sums of a span.

    address    address of its bytes
    position   of its first byte in the slice
    row        [5], see the package
    """
    held = np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)
    base, length, stride = row[:3].tolist()
    keys, sums, at = row[3:].view(np.uint64), np.zeros(2, np.uint64), 0
    while at < num_bytes:
        run, inside = divmod(position + at, length)
        taken = min(length - inside, num_bytes - at, MOST_BYTES)
        sums += _run(held[at : at + taken], base + run * stride + inside, keys)
        at += taken
    return int(sums[0]), int(sums[1])


def _run(held: NDArray[np.uint8], offset: int, keys: U64) -> U64:
    """Return the sums [2] of adjacent bytes from `offset` of the tensor on."""
    first, before = offset // BLOCK, offset % BLOCK
    blocks = -(-(before + len(held)) // BLOCK)
    whole = np.zeros(blocks * BLOCK, np.uint8)  # bytes beside the run are zeros, which add nothing
    whole[before : before + len(held)] = held
    words = whole.view("<u4").reshape(blocks, NUMBERS).astype(np.uint64)
    index = np.arange(first, first + blocks, dtype=np.uint64) * np.uint64(GOLDEN)
    one = np.uint64(1)
    return np.array(
        [((words @ a) * (mix(key + index) | one)).sum() for a, key in zip(numbers(), keys, strict=True)],
        np.uint64,
    )
