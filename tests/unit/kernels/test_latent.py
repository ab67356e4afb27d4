"""Latent attention on a CPU against its reference, its two forms against each other, over a poisoned cache."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from quire.kernels.attention import inputs, sequences
from quire.kernels.attention.inputs import Case
from quire.kernels.latent import LatentView, cpu, native, ref
from quire.kernels.latent.inputs import make, steps, weights

R, P, V = 8, 16, 12
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CASES = steps(*inputs.CASES, Case((90, 1, 5), (130, 70, 5), heads=(2, 1), block_size=16))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers."""
    torch.manual_seed(5)


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[expected.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_absorbed(case: Case, dtype: torch.dtype) -> None:
    q_latent, q_rope, cache, meta = make(case, R, dtype)
    expected = ref.absorbed(q_latent, q_rope, cache, meta, 0.2)
    close(cpu.absorbed(q_latent, q_rope, cache, meta, 0.2), expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("op", [ref, cpu, native])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen(case: Case, op: ModuleType, dtype: torch.dtype) -> None:
    """Attention to all tokens is absorbed attention; to some, absorbed attention to a cache of these alone."""
    q_latent, q_rope, cache, meta = make(case, R, dtype)
    positions = torch.full((len(q_latent), max(case.seq_lens) + 1), -1, dtype=torch.int32)
    for first, last, _, past in sequences(meta):
        for row in range(first, last):
            positions[row, : past + row - first + 1] = torch.arange(past + row - first + 1)
    every = ref.absorbed(q_latent, q_rope, cache, meta, 0.2)
    close(op.chosen(q_latent, q_rope, cache, meta, 0.2, positions), every)
    some = positions[:, ::3].contiguous()
    found = op.chosen(q_latent, q_rope, cache, meta, 0.2, some)
    for first, last, s, _ in sequences(meta):
        for row in range(first, last):
            at = some[row][some[row] >= 0].long()
            block, offset = meta.block_tables[s][at // cache.block_size].long(), at % cache.block_size
            latent, rope = cache.latent[block, 0, offset].float(), cache.rope[block, 0, offset].float()
            scores = q_latent[row].float() @ latent.T + q_rope[row].float() @ rope.T
            close(found[row], ((scores * 0.2).softmax(-1) @ latent).to(dtype))


@pytest.mark.parametrize("value", [V, 40])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expanded_is_absorbed(case: Case, value: int) -> None:
    """Keys and values made of latents, and queries and sums taken to them, are one attention."""
    q_latent, q_rope, cache, meta = make(case, R, torch.float32)
    up = weights(case.heads[0], P, value, q_latent.shape[2], torch.float32)
    plain = torch.randn(len(q_latent), case.heads[0], P)
    q = torch.cat((plain, q_rope), 2)
    sums = ref.absorbed(torch.einsum("thp,hpl->thl", plain, up[:, :P]).contiguous(), q_rope, cache, meta, 0.2)
    expected = torch.einsum("thl,hvl->thv", sums, up[:, P:]).contiguous()
    for op in (ref, cpu):
        out = torch.full_like(expected, float("nan"))
        assert op.expanded(q, up, cache, meta, 0.2, out) is out
        close(out, expected)


@pytest.mark.parametrize("op", [ref, cpu])
def test_expanded_writes_the_rows_of_its_prompts_alone(op: ModuleType) -> None:
    q_latent, q_rope, cache, meta = make(CASES[12], R, torch.float32)
    up, q = weights(6, P, V, q_latent.shape[2], torch.float32), torch.randn(len(q_latent), 6, P + R)
    whole, part = (torch.full((len(q), 6, V), float("nan")) for _ in range(2))
    op.expanded(q, up, cache, meta, 0.2, whole)
    chosen = sequences(meta)[2:3]
    op.expanded(q, up, cache, replace(meta, prompts=chosen), 0.2, part)
    inside = torch.zeros(len(q), dtype=torch.bool)
    inside[chosen[0][0] : chosen[0][1]] = True
    assert torch.equal(part.isnan().all(-1).all(-1), ~inside) and torch.equal(part[inside], whole[inside])


@pytest.mark.parametrize("rows", [1, 9])
def test_what_is_not_finite_shows_in_its_sequence_alone(rows: int) -> None:
    case = steps(Case((rows, rows), (50, 30), heads=(2, 1)))[0]
    q_latent, q_rope, cache, meta = make(case, R, torch.float32)
    expected = cpu.absorbed(q_latent, q_rope, cache, meta, 0.2)
    cache.rope[int(meta.block_tables[0, 2]), 0, 3, 1] = float("nan")
    actual = cpu.absorbed(q_latent, q_rope, cache, meta, 0.2)
    assert actual[:rows].isnan().any(-1).all() and torch.equal(actual[rows:], expected[rows:])


def test_prepare() -> None:
    """By the formulas: each pair is turned by its angle, latents are normalized, everything else stays."""
    tokens, heads, latent, size = 7, 3, 24, 8
    wide = torch.randn(tokens, heads * (P + R) + latent + R)
    before = wide.clone()
    q, kv = wide[:, : -latent - R].unflatten(1, (heads, -1)), wide[:, -latent - R :]
    norm, angles = torch.rand(latent) + 0.5, torch.rand(tokens, R // 2) * 6
    cos, sin = torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1)
    arena = [torch.full((4, 2, 1, size, n), float("nan")) for n in (latent, R)]
    cache = LatentView(arena[0][:, 1], arena[1][:, 1])
    slots = torch.randperm(24)[:tokens] + 8
    made = cpu.prepare(q, kv, norm, 1e-3, cos, sin, cache, slots)
    old = before[:, : -latent - R].unflatten(1, (heads, -1))
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(*x.chunk(2, -1))
        spun = pairs * (turn[:, None] if x.dim() == 3 else turn)
        return torch.cat((spun.real, spun.imag), -1)

    assert made.data_ptr() == q.data_ptr() and torch.equal(made[..., :P], old[..., :P])
    close(made[..., P:], turned(old[..., P:]))
    given = before[:, -latent - R : -R]
    close(
        cache.latent[slots // size, 0, slots % size], given / (given.pow(2).mean(1, keepdim=True) + 1e-3).sqrt() * norm
    )
    close(cache.rope[slots // size, 0, slots % size], turned(before[:, -R:]))
    assert all(int((~side.isnan()).all(-1).sum()) == tokens for side in arena), "nothing else was written"
