"""Moved keys and values against the reference, and the rule that rotations add up; the choice of rows."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from quire.args.rope import RopeArgs
from quire.kernels import triton_runtime
from quire.kernels.attention import KVView
from quire.kernels.attention.eight_bits import MOST
from quire.kernels.blend import cpu, latent_sides, ref
from quire.kernels.blend.choice import choose_rows
from quire.kernels.latent import LatentView
from quire.kernels.rope.cpu import apply_rope
from quire.kernels.rope.rotary import Rotary

IMPLS: list[ModuleType] = [cpu]
if triton_runtime.INTERPRETED:
    from quire.kernels.blend import triton

    IMPLS.append(triton)
all_impls = pytest.mark.parametrize("impl", IMPLS, ids=lambda impl: impl.__name__.split(".")[-1])
TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
SIZE, BLOCKS = 8, 9


def cache(dtype: torch.dtype, heads: int, dim: int, values: int, seed: int = 0) -> KVView:
    """Views of a larger tensor whose every element is a number."""
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.randn(BLOCKS, 2, heads, SIZE, d, generator=generator).to(dtype)[:, 1] for d in (dim, values)]
    return KVView(sides[0], sides[1], *((0.5, 2.0) if dtype in MOST else ()))


def slots(num: int) -> tuple[Tensor, Tensor]:
    """Sources in the blocks 1 to 4, out of order, and targets in the others."""
    order = torch.randperm(4 * SIZE, generator=torch.Generator().manual_seed(3))
    return order[:num] + SIZE, order.flip(0)[:num] + 5 * SIZE


def rotation(shifts: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return Rotary(RopeArgs(), dim, torch.device("cpu"), width=dim).rows(shifts, torch.float32)


def copied(kv: KVView) -> KVView:
    return replace(kv, k=kv.k.clone(), v=kv.v.clone())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 16, 16), (3, 20, 20), (1, 8, 24)], ids=str)
@all_impls
def test_matches_reference(impl: ModuleType, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """(heads, size of keys, size of values), a latent's too. Nothing but the targets is written."""
    kv, (sources, targets) = cache(dtype, *shape), slots(13)
    cos, sin = rotation(torch.arange(13) * 7 - 20, shape[1])
    expected, actual = copied(kv), copied(kv)
    ref.move(expected, sources, targets, cos, sin)
    impl.move(actual, sources, targets, cos, sin)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02}.get(dtype, 0.3)
    for found, wanted in ((actual.k, expected.k), (actual.v, expected.v)):
        wrong = (found.float() - wanted.float()).abs() > tolerance
        assert wrong.float().mean() < (0.001 if dtype in MOST else 1e-9)  # the interpreter rounds 1.99 to the code of 1
    untouched = torch.ones(BLOCKS, SIZE, dtype=torch.bool)
    untouched[targets // SIZE, targets % SIZE] = False
    for found, before in ((actual.k, kv.k), (actual.v, kv.v)):
        assert torch.equal(found.float().transpose(1, 2)[untouched], before.float().transpose(1, 2)[untouched])
    distances = ref.deviation(kv, sources, targets, cos, sin)
    torch.testing.assert_close(impl.deviation(kv, sources, targets, cos, sin), distances, rtol=1e-4, atol=1e-4)
    if dtype == torch.float32:
        assert impl.deviation(actual, sources, targets, cos, sin).max() < 1e-8 < distances.min()


@all_impls
def test_a_moved_key_is_the_key_of_its_new_position(impl: ModuleType) -> None:
    """Also with YaRN, whose factor is in the key once."""
    args = RopeArgs(kind="yarn", factor=4.0, original_max_position=128)
    rotary = Rotary(args, 16, torch.device("cpu"), width=24)  # the last four pairs are not rotated
    plain, kv = torch.randn(5, 2, 24), cache(torch.float32, 2, 24, 24)
    old, new = torch.arange(5) * 3, torch.tensor([100, 3, 41, 0, 12])
    sources, targets = slots(5)
    kv.k.transpose(1, 2).index_put_(
        (sources // SIZE, sources % SIZE), apply_rope(plain, *rotary.rows(old, torch.float32))
    )
    impl.move(kv, sources, targets, *rotary.differences(new - old))
    expected = apply_rope(plain, *rotary.rows(new, torch.float32))
    torch.testing.assert_close(kv.k[targets // SIZE, :, targets % SIZE], expected, rtol=0, atol=1e-4)


def test_the_sides_of_a_latent_cache() -> None:
    latent, rope = torch.randn(3, 1, 4, 24), torch.randn(3, 1, 4, 8)
    sides = latent_sides(LatentView(latent, rope, 0.5))
    assert sides.k is rope and sides.v is latent and sides.k_scale == sides.v_scale == 0.5


def test_the_rows_that_deviate_most_are_kept() -> None:
    deviations = torch.tensor([1.0, 9.0, 2.0, 2.0, float("nan"), 0.0, 5.0, 5.0])
    moved, others = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13]), torch.tensor([4, 14, 15])
    for counts, kept in (((0, 0), []), ((2, 1), [1, 2, 10]), ((1, 3), [1, 10, 12, 13]), ((4, 4), moved.tolist())):
        spans = [(0, 4, counts[0]), (4, 8, counts[1])]
        none = torch.zeros(8, dtype=torch.bool)
        assert choose_rows(deviations, none, moved, spans, others).tolist() == sorted(kept + others.tolist())
    before = torch.tensor([True, False, True, True, False, True, False, False])
    for count, kept in ((1, [2]), (2, [2, 3]), (4, [0, 1, 2, 3])):
        rows = choose_rows(deviations, before, moved, [(0, 4, count), (4, 8, 1)], others)
        assert rows.tolist() == sorted([*kept, 11, *others.tolist()])
