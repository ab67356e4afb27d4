"""Sums over bytes in C; contract: see `quire.kernels.sums.ref`."""

import ctypes

from quire.kernels.native.library import loaded
from quire.kernels.sums.ref import I64, numbers


def add(address: int, num_bytes: int, position: int, row: I64) -> tuple[int, int]:
    """Return the two sums of a span; see `ref.add`. Runs without Python's lock."""
    sums = (ctypes.c_uint64 * 2)()
    loaded().quire_sum_bytes(
        address, numbers().ctypes.data, row.ctypes.data, ctypes.addressof(sums), num_bytes, position
    )
    return sums[0], sums[1]
