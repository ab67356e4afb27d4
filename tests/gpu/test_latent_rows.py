"""A cache of rows (fp8_ds_mla) on a GPU against the reference, at the sizes of DeepSeek-V3, over poisoned arenas."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels import triton_runtime
from quire.kernels.attention import AttentionMeta, sequences
from quire.kernels.latent import LatentView, hopper, ref, triton
from quire.kernels.latent.rows import row_view
from quire.kernels.latent_rows import latent_row

from ..support.latent_rows import coded

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device with 8-bit numbers", allow_module_level=True)

from .test_latent import DEVICE, LAYERS, SCALE, STEPS, L, P, R, V, build, check, close

TOP_K = 2048
HEADS = pytest.mark.parametrize("heads", [16, 32, 128])


def given(name: str, heads: int, size: int = 64) -> tuple[Tensor, Tensor, LatentView, LatentView, AttentionMeta]:
    """Queries for latents, whole queries, a cache of rows wider than 2^31 bytes, its numbers, and a step."""
    q, cache, meta = build(STEPS[name], heads, size)
    rows, plain = coded(cache, LAYERS)
    return torch.randn(len(q), heads, L, device=DEVICE).div_(8).to(q.dtype), q, rows, plain, meta


@HEADS
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", [name for name in STEPS if name not in ("chunk", "prompts")])
def test_absorbed(name: str, size: int, heads: int) -> None:
    """As attention to the numbers of the rows; twice the same bits."""
    q_latent, q, rows, plain, meta = given(name, heads, size)
    expected = ref.absorbed(q_latent, q[..., P:], plain, meta, SCALE)
    actual = triton.absorbed(q_latent, q[..., P:], rows, meta, SCALE)
    check(actual, expected)
    assert torch.equal(actual, triton.absorbed(q_latent, q[..., P:], rows, replace(meta, plans={}), SCALE))


@HEADS
@pytest.mark.parametrize("name", ["one", "one-long", "decode-64", "decode-256", "verify", "mixed"])
def test_chosen(name: str, heads: int) -> None:
    """Lists of random tokens, some shorter than a list can be; in parts where there are few rows."""
    q_latent, q, rows, plain, meta = given(name, heads)
    positions = torch.full((len(q), TOP_K), -1, dtype=torch.int32, device=DEVICE)
    for first, last, _, past in sequences(meta):
        for row in range(first, last):
            some = torch.randperm(past + row - first + 1, device=DEVICE)[:TOP_K].sort().values
            positions[row, : len(some)] = some
    expected = ref.chosen(q_latent, q[..., P:], plain, replace(meta, prompts=None), SCALE, positions)
    check(triton.chosen(q_latent, q[..., P:], rows, meta, SCALE, positions), expected)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("name", ["decode-64", "shared", "shared-mixed"])
def test_a_captured_step_serves_other_lengths(name: str, heads: int) -> None:
    q_latent, q, rows, plain, meta = given(name, heads)
    triton.absorbed(q_latent, q[..., P:], rows, replace(meta, plans={}), SCALE)
    graph, static = torch.cuda.CUDAGraph(), replace(meta, plans={})
    with torch.cuda.graph(graph):
        found = triton.absorbed(q_latent, q[..., P:], rows, static, SCALE)
    assert isinstance(meta.seq_lens, Tensor)
    for shorter in (0, 1, 17):
        meta.seq_lens[: len(STEPS[name].seq_lens)] -= shorter
        found.fill_(float("nan"))
        graph.replay()
        check(found, ref.absorbed(q_latent, q[..., P:], plain, meta, SCALE))


@pytest.mark.parametrize("op", [triton, hopper], ids=["triton", "hopper"])
@pytest.mark.parametrize("workspace", [16 << 20, triton.WORKSPACE])
@pytest.mark.parametrize("name", ["prompts", "chunk", "mixed"])
def test_expanded(op: object, name: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if op is hopper and (why := triton_runtime.missing_hopper()):
        pytest.skip(why)
    monkeypatch.setattr(triton, "WORKSPACE", workspace)
    _, q, rows, plain, meta = given(name, 16)
    up = torch.randn(16, P + V, L, device=DEVICE).div_(L**0.5).to(q.dtype)
    meta = replace(meta, prompts=sequences(meta))
    expected, out = (torch.full((len(q), 16, V), float("nan"), dtype=q.dtype, device=DEVICE) for _ in range(2))
    ref.expanded(q, up, plain, meta, SCALE, expected)
    assert op in (triton, hopper)
    close((hopper if op is hopper else triton).expanded(q, up, rows, meta, SCALE, out), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("latent", "rope", "size"), [(L, R, 64), (24, 8, 16), (200, 16, 48)])
def test_prepare(latent: int, rope: int, size: int, dtype: torch.dtype) -> None:
    """The rows of the reference, but where a norm that was rounded otherwise crosses a border; other bytes stay."""
    tokens, heads, plain = 144, 16, 32  # 9 blocks of the smallest size
    wide = torch.randn(tokens, heads * (plain + rope) + latent + rope, device=DEVICE).mul_(2).to(dtype)
    wide[0, -latent - rope : -rope] = 0  # the smallest scale
    norm, angles = (torch.rand(latent, device=DEVICE) + 0.5).to(dtype), torch.rand(tokens, rope // 2, device=DEVICE) * 6
    cos, sin = torch.cat((angles.cos(),) * 2, 1).to(dtype), torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
    slots, found = torch.randperm(9 * size, device=DEVICE)[:tokens] + size, []
    for op in (ref, triton):
        given, raw = wide.clone(), torch.full((10, 3, 1, size, latent_row(latent, rope).size), 77, dtype=torch.uint8)
        q, kv = given[:, : -latent - rope].unflatten(1, (heads, -1)), given[:, -latent - rope :]
        raw = raw.to(DEVICE)
        cache = row_view(raw[:, 1], latent, rope)
        op.prepare(q, kv, norm, 1e-3, cos, sin, cache, slots)
        found.append((given, raw, cache))
    (wanted, raw, cache), (actual, other, made) = found
    bound = 1.6e-2 if dtype == torch.bfloat16 else 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(actual, wanted, rtol=bound, atol=bound)
    place = slots // size, 0, slots % size
    assert cache.scales is not None and made.scales is not None
    torch.testing.assert_close(made.scales[place], cache.scales[place], rtol=bound, atol=0)
    torch.testing.assert_close(made.rope[place], cache.rope[place], rtol=1.6e-2, atol=1e-3)
    codes, expected = (one.latent.view(torch.uint8)[place].view(one.latent.dtype).float() for one in (made, cache))
    assert float((codes == expected).float().mean()) > (0.999 if dtype == torch.float32 else 0.9)
    torch.testing.assert_close(codes, expected, rtol=0.13, atol=2**-8)
    for view in (raw, other):
        view[:, 1][place] = 77
        assert bool((view == 77).all())


def test_expanded_waits_for_nothing() -> None:
    _, q, rows, _, meta = given("chunk", 16)
    up, out = (torch.ones(shape, dtype=q.dtype, device=DEVICE) for shape in ((16, P + V, L), (len(q), 16, V)))
    prompts = sequences(meta)
    triton.expanded(q, up, rows, replace(meta, prompts=prompts, plans={}), SCALE, out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton.expanded(q, up, rows, replace(meta, prompts=prompts, plans={}), SCALE, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
