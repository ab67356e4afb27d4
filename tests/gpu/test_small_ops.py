"""The small kernels and the matrix products of a GPU against their references, at the shapes of real models."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.args.rope import RopeArgs
from quire.kernels import pdl, triton_runtime
from quire.kernels.activation import ACTS
from quire.kernels.activation import ref as activation_ref
from quire.kernels.attention import KVView
from quire.kernels.heads import ref as heads_ref
from quire.kernels.linear import gemv
from quire.kernels.norm import ref as norm_ref
from quire.kernels.rope.rotary import Rotary

if triton_runtime.missing() or triton_runtime.INTERPRETED:
    pytest.skip(triton_runtime.missing() or "kernels are interpreted", allow_module_level=True)

from quire.kernels.activation import triton as activation
from quire.kernels.heads import triton as heads
from quire.kernels.linear import cuda
from quire.kernels.norm import triton as norm

EPS = 1e-6
TOKENS = (1, 3, 16, 64, 1000)
LAYERS = ((4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (4096, 12288), (1152, 896))  # N, K
HEADS = ((16, 8, 128, True), (32, 8, 128, False), (14, 2, 64, False), (8, 8, 80, True))


@pytest.fixture(autouse=True, params=[False, True], ids=["alone", "dependent"])
def launch_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without and with programmatic dependent launch; memory is NaN until it is written."""
    monkeypatch.setattr(pdl, "ENABLED", request.param)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def close(actual: Tensor, expected: Tensor, bound: float = 1e-2) -> None:
    assert actual.shape == expected.shape
    actual, expected = actual.double(), expected.double()
    assert float((actual - expected).norm() / expected.norm().clamp_min(1e-30)) < bound
    assert float((actual - expected).abs().max()) <= 2 * bound * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("tokens", [*TOKENS, 8192])
@pytest.mark.parametrize("width", [128, 896, 1024, 4096])
def test_norm_and_activation(device: torch.device, tokens: int, width: int) -> None:
    x, weight = draw(tokens, 2 * width, device=device), draw(width, device=device)
    part = x[:, width:]
    close(norm.rms_norm(part, weight, EPS), norm_ref.rms_norm(part.double().float(), weight.float(), EPS))
    for act in ACTS:
        close(activation.gated(x, act), activation_ref.gated(x.float(), act))
    close(activation.opened(*x.chunk(2, 1)), activation_ref.opened(*x.float().chunk(2, 1)))


@pytest.mark.parametrize("tokens", [*TOKENS, 8192])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim", "normed"), HEADS)
def test_heads(device: torch.device, tokens: int, q_heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    qkv = draw(tokens, q_heads + 2 * kv_heads, dim, device=device)
    weight = draw(q_heads + kv_heads, dim, device=device) if normed else None
    rotary = Rotary(RopeArgs(theta=1e6), dim, device, width=dim)
    cos, sin = rotary.rows(torch.arange(tokens, device=device), torch.bfloat16)
    slots = torch.randperm((tokens // 64 + 1) * 64, device=device)[:tokens] + 64
    views = [
        KVView(*torch.full((2, tokens // 64 + 2, kv_heads, 64, dim), torch.nan, device=device).bfloat16())
        for _ in range(2)
    ]
    q = heads.prepare(qkv, weight, EPS, cos, sin, views[0], slots)
    close(q, heads_ref.prepare(qkv, weight, EPS, cos, sin, views[1], slots))
    for actual, expected in ((views[0].k, views[1].k), (views[0].v, views[1].v)):
        assert torch.equal(actual.isnan(), expected.isnan())
        close(actual.nan_to_num(), expected.nan_to_num())


def test_heads_reach_the_end_of_a_large_cache(device: torch.device) -> None:
    blocks, kv_heads, size, dim = 1200, 8, 64, 128
    arena = torch.empty(blocks, 28, 2, kv_heads, size, dim, dtype=torch.bfloat16, device=device)
    assert arena.numel() > 2**32
    kv = KVView(arena[:, 27, 0], arena[:, 27, 1])
    qkv = draw(3, 32, dim, device=device)
    slots = torch.tensor([blocks * size - 1, (blocks - 1) * size, 700 * size], device=device)
    one, zero = torch.ones(3, dim, device=device).bfloat16(), torch.zeros(3, dim, device=device).bfloat16()
    heads.prepare(qkv, None, EPS, one, zero, kv, slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(kv.k[slot // size, :, slot % size], qkv[row, 16:24])
        assert torch.equal(kv.v[slot // size, :, slot % size], qkv[row, 24:])


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_rotation_is_that_of_the_cpu(device: torch.device, kind: str) -> None:
    args = RopeArgs(kind=kind, theta=1e6)
    if kind == "yarn":
        args = replace(args, factor=4.0, original_max_position=4096)
    positions = torch.cat((torch.arange(5000), torch.arange(1_000_000, 1_048_576)))
    expected = Rotary(args, 128, torch.device("cpu"), width=128).rows(positions, torch.float32)
    rotary = Rotary(args, 128, device, width=128)
    for actual, wanted in zip(rotary.rows(positions.to(device), torch.float32), expected, strict=True):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-6, atol=3e-7)
    for actual, wanted in zip(rotary.rows(positions.to(device), torch.bfloat16), expected, strict=True):
        torch.testing.assert_close(actual.cpu().float(), wanted.bfloat16().float(), rtol=2.0**-7, atol=3e-7)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 13, 16, 17, 64, 200])
@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_products(device: torch.device, rows: int, n: int, k: int) -> None:
    x, weight, scale = draw(rows, k, device=device), draw(n, k, device=device) * k**-0.5, draw(k, device=device)
    bias, packed = draw(n, device=device), cuda.pack(weight)
    normed = norm_ref.rms_norm(x.float(), scale.float(), EPS).double()
    exact, after = x.double() @ weight.double().t(), normed @ weight.double().t() + bias.double()
    close(cuda.run(x, packed, None), exact)
    close(cuda.run_float(x, packed, None), exact, max(1e-5, 2e-9 * k))  # Hopper's sums drop bits at each addition
    close(cuda.run_norm(x, scale, EPS, packed, bias), after)
    gate, up = after.chunk(2, -1)
    close(cuda.run_norm_gated(x, scale, EPS, packed, bias), gate * torch.sigmoid(gate) * up, 2e-2)
    for act in ACTS[1:]:
        close(cuda.run_norm_gated(x, scale, EPS, packed, bias, act), activation_ref.gated(after, act), 2e-2)
    residual = draw(rows, n, device=device)
    expected = residual.double() + exact + bias.double()
    close(cuda.run_add(x, packed, bias, residual), expected)


@pytest.mark.parametrize("rows", [1, 4, 16, 33, 64, 100])
def test_head(device: torch.device, rows: int) -> None:
    x, weight = draw(rows, 1024, device=device), draw(151936, 1024, device=device) / 32
    logits = cuda.run_float(x, weight, None)
    close(logits, x.double() @ weight.double().t(), 1e-5)
    found = cuda.rows(weight, torch.tensor([0, 151935, 151936, -1, 77], device=device))
    assert found.isnan().all(1).tolist() == [False, False, True, True, False]
    assert torch.equal(found[[0, 1, 4]], weight[[0, 151935, 77]])


def test_products_are_the_same_every_time_and_in_graphs(device: torch.device) -> None:
    x, weight, scale = draw(16, 1024, device=device), draw(4096, 1024, device=device), draw(1024, device=device)
    assert 16 <= cuda.FEW_ROWS or gemv.MOST_ROWS >= 16

    def work() -> list[Tensor]:
        normed = [norm.rms_norm(x[:rows], scale, EPS) for rows in (1, 4, 8, 16)]
        return normed + [gemv.product(each, weight, norm=scale, eps=EPS) for each in normed]

    expected = work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
