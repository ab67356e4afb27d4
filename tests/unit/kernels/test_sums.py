"""Sums over bytes: every implementation makes those of the definition, and slices add up to the whole."""

from collections.abc import Callable

import numpy as np
import pytest

from quire.kernels.native import library
from quire.kernels.sums import native, ref

KEYS = (0x9A3F00C1D2E4B567, 0x0123456789ABCDEF)
M = 2**64


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % M
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % M
    return x ^ (x >> 31)


def defined(tensor: bytes, offsets: list[int]) -> tuple[int, int]:
    """The sums of the bytes at these offsets, as the package writes them."""
    golden, found = 0x9E3779B97F4A7C15, []
    for t, key in enumerate(KEYS):
        numbers = [mix((1024 * t + i + 1) * golden % M) >> 32 for i in range(1024)]
        found.append(
            sum(
                (tensor[o] << 8 * (o % 4)) * numbers[o // 4 % 1024] * (mix((key + o // 4096 * golden) % M) | 1)
                for o in offsets
            )
            % M
        )
    return found[0], found[1]


def row(base: int, length: int, stride: int) -> ref.I64:
    return np.array([base, length, stride, *np.array(KEYS, np.uint64).view(np.int64)], np.int64)


@pytest.fixture(params=["ref", "native"])
def add(request: pytest.FixtureRequest) -> Callable[..., tuple[int, int]]:
    if request.param == "native" and (why := library.missing()):
        pytest.skip(why)
    return ref.add if request.param == "ref" else native.add


@pytest.mark.parametrize(("rows", "width", "first", "count"), [(9, 1000, 0, 1000), (7, 1403, 401, 333), (5, 3, 1, 1)])
@pytest.mark.parametrize("ends", [(), (1,), (5, 700), (4, 4, 1500, 1501)])
def test_columns_in_spans_add_up_to_the_definition(
    add: Callable[..., tuple[int, int]], rows: int, width: int, first: int, count: int, ends: tuple[int, ...]
) -> None:
    tensor = np.random.default_rng(rows).integers(0, 256, (rows, width), np.uint8)
    held = np.ascontiguousarray(tensor[:, first : first + count]).reshape(-1)
    offsets = [r * width + first + i for r in range(rows) for i in range(count)]
    sums, cuts = [0, 0], [0, *(min(end, len(held)) for end in ends), len(held)]
    for start, end in zip(cuts, cuts[1:], strict=False):
        part = held[start:end].copy()
        low, high = add(part.ctypes.data, len(part), start, row(first, count, width))
        sums = [(sums[0] + low) % M, (sums[1] + high) % M]
    assert tuple(sums) == defined(tensor.tobytes(), offsets)


def test_large_spans_are_those_of_the_reference() -> None:
    if why := library.missing():
        pytest.skip(why)
    held = np.random.default_rng(1).integers(0, 256, 3_000_001, np.uint8)
    for at, base in ((0, 0), (1, 4095), (2, 8)):
        part, own = held[at:], row(base, len(held) + 9, 0)
        assert native.add(part.ctypes.data, len(part), 3, own) == ref.add(part.ctypes.data, len(part), 3, own)


def test_a_flipped_sign_and_swapped_words_change_both_sums(add: Callable[..., tuple[int, int]]) -> None:
    """Also in pairs, and in words that lie a block apart: these are where sums with odd factors fail."""
    plain = np.random.default_rng(2).integers(0, 256, 3 * 4096, np.uint8)
    seen = [add(plain.ctypes.data, len(plain), 0, row(0, len(plain), 0))]
    for flipped in ([7], [7, 15], [3, 4099], [7, 15, 23, 31]):
        changed = plain.copy()
        changed[flipped] ^= 0x80
        seen.append(add(changed.ctypes.data, len(plain), 0, row(0, len(plain), 0)))
    for order in ([1, 0, 2], [0, 2, 1]):
        moved = np.ascontiguousarray(plain.reshape(3, 4096)[order])
        seen.append(add(moved.ctypes.data, len(plain), 0, row(0, len(plain), 0)))
    for t in range(2):
        assert len({sums[t] for sums in seen}) == len(seen)
