"""A KV cache of 8-bit codes, read and written by the kernels of a CPU and by the references."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from quire.kernels.attention import KVView, cpu, inputs, ref, sequences
from quire.kernels.attention.eight_bits import MOST, encode
from quire.kernels.heads import cpu as heads_cpu
from quire.kernels.heads import inputs as heads_inputs
from quire.kernels.heads import ref as heads_ref
from quire.kernels.latent import LatentView
from quire.kernels.latent import cpu as latent_cpu
from quire.kernels.latent import ref as latent_ref
from quire.kernels.latent.inputs import make, steps, weights

from ...support import eight_bit_truth as truth
from ...support.eight_bit_truth import DTYPES, K_SCALE, V_SCALE

CASES = inputs.CASES[::2]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("impl", [cpu, ref], ids=["cpu", "ref"])
def test_attention(impl: ModuleType, case: inputs.Case, dtype: torch.dtype, cache: torch.dtype) -> None:
    q, kv, meta = inputs.make(case, dtype)
    kv = truth.coded(kv, cache)
    expected = truth.attention(q, kv, meta, 0.1)
    truth.near(impl.paged_attention(q, kv, replace(meta, plans={}), 0.1), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("impl", [latent_cpu, latent_ref], ids=["cpu", "ref"])
def test_latent_attention(impl: ModuleType, dtype: torch.dtype, cache: torch.dtype) -> None:
    for case in steps(*inputs.CASES[8:20:3]):
        q_latent, q_rope, kept, meta = make(case, 8, dtype)
        kept = truth.coded_latents(kept, cache)
        expected = truth.absorbed(q_latent, q_rope, kept, meta, 0.1)
        truth.near(impl.absorbed(q_latent, q_rope, kept, meta, 0.1), expected, TOLERANCE[dtype])
        heads = q_latent.shape[1]
        q, up = torch.randn(len(q_latent), heads, 24).to(dtype), weights(heads, 16, 12, 24, dtype)
        out, meta = q.new_empty(len(q), heads, 12), replace(meta, prompts=sequences(meta))
        wanted = truth.expanded(q, up, kept, meta, 0.1, 12)
        truth.near(impl.expanded(q, up, kept, meta, 0.1, out), wanted, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize("impl", [heads_cpu, heads_ref], ids=["cpu", "ref"])
def test_heads_write_codes(impl: ModuleType, cache: torch.dtype) -> None:
    """The codes of exactly the numbers that a cache in the type of the computation would hold; q is the same."""
    for case in heads_inputs.CASES:
        *given, kv, slots = heads_inputs.make(case, torch.bfloat16)
        qkv, norm, cos, sin = given
        q = impl.prepare(qkv, norm, 1e-6, cos, sin, kv, slots)
        kept = KVView(torch.zeros_like(kv.k, dtype=cache), torch.zeros_like(kv.v, dtype=cache), K_SCALE, V_SCALE)
        assert torch.equal(impl.prepare(qkv, norm, 1e-6, cos, sin, kept, slots), q)
        at = slots // kv.block_size, slice(None), slots % kv.block_size
        for side, codes, scale in ((kv.k, kept.k, K_SCALE), (kv.v, kept.v, V_SCALE)):
            exact = (side[at].float() * (1 / scale)).clamp(-MOST[cache], MOST[cache]).to(cache)
            assert torch.equal(codes[at].view(torch.uint8), exact.view(torch.uint8))


def test_latents_are_written_as_codes() -> None:
    q, kv, norm = torch.randn(5, 3, 24), torch.randn(5, 32), torch.rand(24) + 0.5
    angles, slots = torch.rand(5, 4), torch.tensor([4, 9, 6, 7, 10])
    cos, sin = torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1)
    plain = LatentView(torch.zeros(3, 1, 4, 24), torch.zeros(3, 1, 4, 8))
    codes = LatentView(plain.latent.to(DTYPES[0]), plain.rope.to(DTYPES[0]), K_SCALE)
    for cache in (plain, codes):
        latent_ref.prepare(q.clone(), kv, norm, 1e-6, cos, sin, cache, slots)
    for side, made in ((plain.latent, codes.latent), (plain.rope, codes.rope)):
        assert torch.equal(encode(side, K_SCALE, DTYPES[0]).view(torch.uint8), made.view(torch.uint8))


@pytest.mark.parametrize("cache", DTYPES, ids=str)
def test_codes(cache: torch.dtype) -> None:
    """Halfway goes to even, what is too large to the largest number (a cast alone makes NaN or infinity), NaN stays."""
    most = MOST[cache]
    numbers = torch.tensor([1.0, 1.0625, 1.1875, -1e9, 1e30, most * 1.1, float("inf"), 0.0, float("nan")])
    made = encode(numbers, 1.0, cache).float()
    wanted = [1.0, 1.0, 1.25, -most, most, most, most, 0.0]
    assert made[:-1].tolist() == wanted and made[-1].isnan()
    assert encode(numbers, 0.5, cache).float()[0] == 2.0 and encode(numbers, 1.0, torch.float32) is numbers
