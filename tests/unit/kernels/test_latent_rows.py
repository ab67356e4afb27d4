"""The FP8 cache of latents with scales of their own (fp8_ds_mla): its bytes, its rounding, and kernels that read it."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from quire.kernels.attention import inputs, sequences
from quire.kernels.latent import LatentView, cpu, native, ref
from quire.kernels.latent.inputs import make, steps, weights
from quire.kernels.latent.rows import numbers, row_view, write_rows
from quire.kernels.latent_rows import latent_row

from ...support.latent_rows import coded

R, P, V = 8, 16, 12
CASES = steps(*inputs.CASES[::3])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=TOLERANCE[dtype])


def test_the_bytes_of_a_token() -> None:
    """As FlashMLA reads them: 512 codes, 4 scales, 64 rotated numbers."""
    assert latent_row(512, 64) == (512, 4, 528, 656)
    raw = torch.zeros(2, 1, 64, 656, dtype=torch.uint8)
    cache = row_view(raw, 512, 64)
    latent, rope = torch.randn(1, 512), torch.randn(1, 64)
    latent[0, 128:256] *= 1000
    write_rows(latent, rope, cache, torch.tensor([64 + 5]))
    row = raw[1, 0, 5]
    codes, scales = row[:512].view(torch.float8_e4m3fn).float().view(4, 128), row[512:528].view(torch.float32)
    torch.testing.assert_close(scales, latent.view(4, 128).abs().amax(1) / 448)
    assert codes.abs().amax(1).tolist() == [448.0] * 4
    assert torch.equal(row[528:].view(torch.bfloat16), rope[0].bfloat16())
    assert not raw[0].any() and not raw[1, 0, 4].any() and not raw[1, 0, 6].any()


@pytest.mark.parametrize("width", [24, 200, 512])
def test_rounding(width: int) -> None:
    """Each code is within half a step: 1/16 of the number, or of the smallest normal code of its tile."""
    latent, rope = torch.randn(7, width) * torch.rand(7, 1) * 30, torch.randn(7, R)
    cache = row_view(torch.zeros(2, 1, 8, latent_row(width, R).size, dtype=torch.uint8), width, R)
    write_rows(latent, rope, cache, torch.arange(8, 15))
    found, turned = numbers(cache, (torch.ones(7, dtype=torch.int64), torch.arange(7)))
    for tile in range(0, width, 128):
        own = latent[:, tile : tile + 128]
        step = (own.abs() / 16).maximum(own.abs().amax(1, keepdim=True) / 448 / 1024)
        assert ((found[:, tile : tile + 128] - own).abs() <= step * 1.001).all()
    assert torch.equal(turned, rope.bfloat16().float())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("op", [ref, cpu, native])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_read_rows(case: inputs.Case, op: ModuleType, dtype: torch.dtype) -> None:
    """All forms of attention: as to a cache that holds the rows' numbers in float32."""
    q_latent, q_rope, cache, meta = make(case, R, dtype)
    rows, plain = coded(cache)
    near(op.absorbed(q_latent, q_rope, rows, meta, 0.2), ref.absorbed(q_latent, q_rope, plain, meta, 0.2), dtype)
    positions = torch.full((len(q_latent), max(case.seq_lens)), -1, dtype=torch.int32)
    for first, last, _, past in sequences(meta):
        for row in range(first, last):
            some = torch.arange(0, past + row - first + 1, 3)
            positions[row, : len(some)] = some
    expected = ref.chosen(q_latent, q_rope, plain, meta, 0.2, positions)
    near(op.chosen(q_latent, q_rope, rows, meta, 0.2, positions), expected, dtype)
    heads = q_latent.shape[1]
    q, up = torch.randn(len(q_latent), heads, P + R).to(dtype), weights(heads, P, V, q_latent.shape[2], dtype)
    outs = [torch.zeros(len(q), heads, V, dtype=dtype) for _ in range(2)]
    op.expanded(q, up, rows, meta, 0.2, outs[0])
    near(outs[0], ref.expanded(q, up, plain, meta, 0.2, outs[1]), dtype)


def test_prepare_writes_rows() -> None:
    """Rows hold the numbers of a float32 cache, rounded: the norm and the rotation come before."""
    q, kv, norm = torch.randn(5, 3, P + R), torch.randn(5, 24 + R), torch.rand(24)
    cos, sin, slots = torch.rand(5, R), torch.rand(5, R), torch.tensor([8, 9, 10, 15, 17])
    plain = LatentView(torch.zeros(3, 1, 8, 24), torch.zeros(3, 1, 8, R))
    rows = row_view(torch.zeros(3, 1, 8, latent_row(24, R).size, dtype=torch.uint8), 24, R)
    for cache in (plain, rows):
        ref.prepare(q.clone(), kv.clone(), norm, 1e-6, cos, sin, cache, slots)
    wanted, _ = coded(replace(plain))
    for found, expected in zip(numbers(rows, torch.arange(3)), numbers(wanted, torch.arange(3)), strict=True):
        torch.testing.assert_close(found, expected)
