"""A cache of rows (fp8_ds_mla) for GPUs in Triton's interpreter, over poisoned pages, and compiled for sm_90 without a
GPU."""

import itertools
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels import triton_runtime
from quire.kernels.attention import inputs, sequences
from quire.kernels.attention.inputs import Case
from quire.kernels.latent import ref, triton, triton_contexts
from quire.kernels.latent.inputs import make, steps, weights
from quire.kernels.latent.rows import numbers, row_view
from quire.kernels.latent_rows import latent_row

from ..support.eight_bit_truth import written
from ..support.full import FULL
from ..support.latent_rows import coded
from .test_latent import P, R, V, on_device, poisoned, share

__all__ = ["poisoned"]

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

TOP_K = 40
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
# Latents of a part of a tile, of one and a part, and of three tiles, which a kernel pads to four.
CASES = (
    *steps(inputs.CASES[11], Case((130, 1, 70), (260, 129, 70), heads=(3, 1), block_size=64)),
    *steps(Case((1, 1, 1), (300, 64, 65), heads=(16, 1), block_size=64), latent=200),
    *steps(Case((3, 2), (30, 129), heads=(5, 1), block_size=48), latent=384, rope=16),
)
every = pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), (CASES[2], torch.float16)],
    ids=str,
)


def near(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[actual.dtype])


@every
def test_absorbed_and_expanded(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention to a cache that holds the rows' numbers in float32; expanded in one piece and in many."""
    rope = case.head_dim - 384 if case.head_dim == 400 else R
    q_latent, q_rope, cache, meta = make(case, rope, dtype)
    rows, plain = coded(cache)
    expected = ref.absorbed(q_latent, q_rope, plain, meta, 0.2)
    near(triton.absorbed(q_latent, q_rope, rows, on_device(meta), 0.2), expected)
    heads = case.heads[0]
    q, up = torch.randn(len(q_latent), heads, P + rope).to(dtype), weights(heads, P, V, q_latent.shape[2], dtype)
    expected, out = torch.full((2, len(q), heads, V), float("nan"), dtype=dtype)
    ref.expanded(q, up, plain, meta, 0.2, expected)
    for workspace in (1, 1 << 28):
        monkeypatch.setattr(triton, "WORKSPACE", workspace)
        near(triton.expanded(q, up, rows, on_device(meta), 0.2, out), expected)


@every
def test_attention_to_chosen_tokens(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several parts; from any row of the step on; from codes, and from numbers that were made of them once."""
    rope = case.head_dim - 384 if case.head_dim == 400 else R
    q_latent, q_rope, cache, meta = make(case, rope, dtype)
    rows, plain = coded(cache)
    positions = torch.full((len(q_latent), TOP_K), -1, dtype=torch.int32)
    for first, last, _, past in sequences(meta):
        for row in range(first, last):
            some = torch.randperm(past + row - first + 1)[:TOP_K].sort().values
            positions[row, : len(some)] = some
    expected = ref.chosen(q_latent, q_rope, plain, replace(meta, prompts=None), 0.2, positions)
    for first, read in itertools.product((0, 1), (0, 1 << 30)):
        monkeypatch.setattr(triton_contexts, "READ", read)
        device = on_device(meta)
        given = q_latent[first:].contiguous(), q_rope[first:], rows, device, 0.2, positions[first:], first
        near(triton.chosen(*given), expected[first:])
        assert any("contexts" in str(key) for key in device.plans) == (not read)


@pytest.mark.parametrize("size", [64, 48])
def test_shared_prefixes(size: int) -> None:
    """Two groups, a member that ends with the prefix, and a sequence of no group."""
    lens = (5 * size + 3, 6 * size, 4 * size, 3 * size - 1, 2 * size + 7, 2 * size)
    case = steps(Case((1,) * 6, lens, heads=(16, 1), block_size=size), latent=200)[0]
    q_latent, q_rope, cache, meta = make(case, R, torch.float32)
    device = share(meta, ((2, 1, 0), 4), ((5, 4), 2))
    rows, plain = coded(cache)
    near(triton.absorbed(q_latent, q_rope, rows, device, 0.2), ref.absorbed(q_latent, q_rope, plain, meta, 0.2))
    ((plan,),) = (plans.values() for plans in device.plans.values())  # type: ignore[attr-defined]
    assert plan.items[0, 3] == 4 * size, "the prefix is read by a kernel of its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "plain", "latent", "rope", "size"),
    [(3, 16, 128, 512, 64, 64), (5, 3, 16, 24, 8, 8), (7, 2, 8, 200, 16, 48)],
)
def test_prepare(tokens: int, heads: int, plain: int, latent: int, rope: int, size: int, dtype: torch.dtype) -> None:
    """The bytes of the reference, but for codes that the interpreter rounds otherwise; other bytes stay."""
    wide = torch.randn(tokens, heads * (plain + rope) + latent + rope).mul_(2).to(dtype)
    wide[0, -latent - rope : -rope] = 0  # the smallest scale
    wide[1, -latent - rope] = 1e4  # codes of its tile are small
    norm, angles = (torch.rand(latent) + 0.5).to(dtype), torch.rand(tokens, rope // 2) * 6
    cos, sin = torch.cat((angles.cos(),) * 2, 1).to(dtype), torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
    slots, found = torch.randperm(3 * size)[:tokens] + size, []
    for op in (ref, triton):
        given, raw = wide.clone(), torch.full((4, 3, 1, size, latent_row(latent, rope).size), 77, dtype=torch.uint8)
        q, kv = given[:, : -latent - rope].unflatten(1, (heads, -1)), given[:, -latent - rope :]
        cache = row_view(raw[:, 1], latent, rope)
        assert op.prepare(q, kv, norm, 1e-3, cos, sin, cache, slots).data_ptr() == q.data_ptr()
        found.append((given, raw, cache))
    (given, raw, cache), (_, other, made) = found[::-1]
    bound = 1.6e-2 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(given, found[0][0], rtol=bound, atol=bound)
    place = slots // size, 0, slots % size
    assert cache.scales is not None and made.scales is not None
    torch.testing.assert_close(cache.scales[place], made.scales[place], rtol=bound, atol=0)
    torch.testing.assert_close(cache.rope[place], made.rope[place], rtol=1.6e-2, atol=1e-3)
    if dtype == torch.float32:
        written(cache.latent[place], made.latent[place])
    for view in (raw, other):
        view[:, 1][place] = 77
        assert (view == 77).all()


def test_a_latent_that_is_no_number_is_a_large_one() -> None:
    """Of its tile alone: what projects a page multiplies all of its rows."""
    cache = row_view(torch.zeros(2, 1, 8, latent_row(200, R).size, dtype=torch.uint8), 200, R)
    kv = torch.randn(1, 200 + R)
    kv[0, 150] = float("nan")
    turn, norm = torch.ones(1, R), torch.ones(200)
    triton.prepare(torch.zeros(1, 1, P + R), kv, norm, 1e-6, turn, turn * 0, cache, torch.tensor([9]))
    latent, _ = numbers(cache, (torch.tensor([1]), torch.tensor([1])))
    assert latent.isfinite().all() and latent.abs().max() > 1e17


def test_prepare_takes_no_strange_strides() -> None:
    cache = row_view(torch.zeros(2, 1, 8, latent_row(256, R).size, dtype=torch.uint8), 256, R)
    assert cache.scales is not None
    strange = replace(cache, scales=cache.scales.transpose(2, 3).contiguous().transpose(2, 3))
    zeros = torch.zeros
    with pytest.raises(ValueError, match="strides"):
        triton.prepare(
            zeros(1, 1, P + R),
            zeros(1, 256 + R),
            zeros(256),
            1e-6,
            zeros(1, R),
            zeros(1, R),
            strange,
            zeros(1, dtype=torch.int64),
        )


KERNELS = {"_prepare_kernel", "_places_kernel", "slots_kernel", "chosen_kernel", "join_kernel"}


@pytest.mark.parametrize(
    ("part", "kernels"),
    [
        ("decodes", KERNELS | {"_plan_kernel", "absorbed_kernel", "shared_kernel", "merge_kernel"}),
        ("prompts", KERNELS - {"join_kernel"} | {"_widen_rows", "hopper._expanded_kernel"}),
    ],
)
def test_compiles(part: str, kernels: set[str], compiled: Callable[..., set[str]]) -> None:
    found = compiled("compile_latent_rows", part)
    assert found == kernels or (FULL and found > kernels)
