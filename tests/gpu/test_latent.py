"""Latent attention on a GPU against its reference in float32, at the sizes of DeepSeek-V2-Lite and V3, over poisoned
arenas wider than 2^31 elements."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.step import SharedPrefix
from quire.kernels import triton_runtime
from quire.kernels.attention import AttentionMeta, SharedBlocks, inputs, sequences
from quire.kernels.attention.triton_plan import pack_shared
from quire.kernels.latent import LatentView, hopper, ref, triton
from quire.kernels.latent.parts import packed_parts
from quire.kernels.rope.rotary import Rotaries
from quire.kernels.select import Kernels, select_kernels
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.latent import LatentAttention
from quire.plan.layout import layout
from quire.plan.linears import linear_plans

from ..support.changed_args import latent_of
from ..support.filled_models import fill_layer

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda")
L, R, P, V, LAYERS = 512, 64, 128, 128, 27
SCALE = (P + R) ** -0.5


class Expanded(Protocol):
    """An implementation of `quire.kernels.latent` for prompts."""

    def expanded(
        self, q: Tensor, kv_up: Tensor, cache: LatentView, meta: AttentionMeta, scale: float, out: Tensor
    ) -> Tensor: ...


TRITON: Expanded = triton
HOPPER: Expanded = hopper
both = pytest.mark.parametrize("op", [TRITON, HOPPER], ids=["triton", "hopper"])


@dataclass(frozen=True)
class Step:
    """Rows and context length of every sequence; the first `prefix` tokens are the same for all when not 0."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    prefix: int = 0


STEPS = {
    "one": Step((1,), (640,)),
    "one-long": Step((1,), (32_000,)),
    "decode-64": Step((1,) * 64, tuple(range(577, 641))),
    "decode-256": Step((1,) * 256, tuple(range(1, 769, 3))),
    "verify": Step((4,) * 32, tuple(range(100, 2020, 60))),
    "mixed": Step((1,) * 20 + (150, 7), (*range(500, 520), 3000, 900)),
    "prompts": Step((512, 1, 1500), (512, 70, 2000)),
    "chunk": Step((1024,), (9000,)),
    "shared": Step((1,) * 64, tuple(range(4096, 4224, 2)), prefix=4096),
    "shared-verify": Step((2,) * 9, tuple(range(1024, 1042, 2)), prefix=1024),
    "shared-mixed": Step((1,) * 20 + (128, 128), (*range(1100, 1120), 1152, 1153), prefix=1024),
}


def build(step: Step, heads: int, size: int) -> tuple[Tensor, LatentView, AttentionMeta]:
    """q [T, heads, P + R] and a cache at the far end of an arena, NaN wherever nothing may be read; a padded step."""
    random = torch.Generator(DEVICE).manual_seed(7)
    counts = [-(-length // size) for length in step.seq_lens]
    page = LAYERS * size * (L + R)
    num_blocks = 2**31 // page + sum(counts) + 2
    arena = torch.full((num_blocks, LAYERS, size * (L + R)), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    mine = arena[:, -1]
    cache = LatentView(mine[:, : size * L].unflatten(1, (1, size, L)), mine[:, size * L :].unflatten(1, (1, size, R)))
    ids = num_blocks - 1 - torch.randperm(sum(counts), generator=random, device=DEVICE).int()
    tables = torch.full((len(counts) + 3, max(counts) + 1), 2**30, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(len(counts), 0, -1, device=DEVICE, dtype=torch.int32)
    for row, length, blocks in zip(rows.tolist(), step.seq_lens, ids.split(counts), strict=True):
        tables[row, : len(blocks)] = blocks
        tables[row, : step.prefix // size] = tables[len(counts), : step.prefix // size]  # the first sequence's
        at = torch.arange(length, device=DEVICE)
        for side in (cache.latent, cache.rope):
            fresh = torch.randn(length, side.shape[3], generator=random, device=DEVICE)
            side[blocks[at // size].long(), 0, at % size] = fresh.to(side.dtype)
    shared = None
    if step.prefix:
        slots = np.arange(len(counts), dtype=np.int32)
        packed = pack_shared(
            [SharedPrefix(slots, step.prefix // size)],
            slots,
            np.array(step.query_lens, np.int32),
            num_groups=4,
            most_seqs=400,
            decode_len=min(step.query_lens),
        )
        shared = SharedBlocks.view(torch.from_numpy(packed).to(DEVICE), 4, 400, len(counts) + 2)
    longest = max(step.query_lens)
    meta = AttentionMeta(
        query_start=torch.tensor([0, *step.query_lens, 0, 0], device=DEVICE).cumsum(0).int(),
        seq_lens=torch.tensor([*step.seq_lens, 0, 0], dtype=torch.int32, device=DEVICE),
        block_tables=tables,
        kv_slots=torch.zeros(sum(step.query_lens), dtype=torch.int64, device=DEVICE),
        table_rows=torch.cat((rows, torch.zeros(2, dtype=torch.int32, device=DEVICE))),
        max_query_len=longest,
        decode_len=longest if longest <= 8 else 1,
        shared=shared,
    )
    q = torch.randn(sum(step.query_lens), heads, P + R, generator=random, device=DEVICE).to(torch.bfloat16)
    return q, cache, meta


def close(actual: Tensor, expected: Tensor) -> None:
    bound = 2e-2 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=bound)


def check(actual: Tensor, expected: Tensor) -> None:
    """Relative to what is expected: sums over long contexts are small."""
    close(actual, expected)
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < 1e-2, f"relative error {error}"


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 60, 64, 200, 256, 300])
@pytest.mark.parametrize("heads", [16, 128])
def test_project(rows: int, heads: int) -> None:
    """Both products with the projection of latents, queries as they lie beside the rotated ones."""
    q = torch.randn(rows, heads * (P + R) + 576, device=DEVICE).to(torch.bfloat16)[:, :-576]
    q, up = q.unflatten(1, (heads, -1))[..., :P], torch.randn(heads, P + V, L, device=DEVICE).to(torch.bfloat16)
    sums = torch.randn(rows, heads, L, device=DEVICE).to(torch.bfloat16)
    for x, weights in ((q, up[:, :P]), (sums, up[:, P:].transpose(1, 2))):
        out = torch.full((rows, heads, weights.shape[2]), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        expected = torch.einsum("thk,hkn->thn", x.float(), weights.float())
        torch.testing.assert_close(triton.project(x, weights, out).float(), expected, rtol=8e-3, atol=2e-2)


@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", [name for name in STEPS if name not in ("chunk", "prompts")])
def test_absorbed(name: str, size: int, heads: int) -> None:
    q, cache, meta = build(STEPS[name], heads, size)
    q_latent = torch.randn(len(q), heads, L, device=DEVICE).div_(8).to(torch.bfloat16)
    expected = ref.absorbed(q_latent, q[..., P:], cache, meta, SCALE)
    actual = triton.absorbed(q_latent, q[..., P:], cache, meta, SCALE)
    check(actual, expected)
    again = triton.absorbed(q_latent, q[..., P:], cache, replace(meta, plans={}), SCALE)
    assert torch.equal(actual, again), "the same step twice gives other bits"


@pytest.mark.parametrize("name", ["one", "one-long", "decode-64", "decode-256", "shared"])
def test_parts_of_contexts_on_two_ranks(name: str) -> None:
    """They have even and odd blocks; of a context below 65 tokens the second has nothing."""
    q, cache, meta = build(STEPS[name], 128, 64)
    q_latent, found = torch.randn(len(q), 128, L, device=DEVICE).div_(8).to(torch.bfloat16), []
    assert isinstance(meta.seq_lens, Tensor)
    for part in range(2):
        own = meta.seq_lens // 128 * 64 + (meta.seq_lens % 128 - 64 * part).clamp(0, 64)
        tables, shared = meta.block_tables[:, part::2].contiguous(), meta.shared
        shared = None if shared is None else replace(shared, blocks=shared.blocks // 2)
        given = replace(meta, seq_lens=own, block_tables=tables, shared=shared, plans={})
        lse, right = torch.empty(2, len(q), 128, device=DEVICE)
        sums = triton.absorbed(q_latent, q[..., P:], cache, given, SCALE, lse)
        ref.absorbed(q_latent, q[..., P:], cache, given, SCALE, right)
        torch.testing.assert_close(lse, right, rtol=0, atol=2e-2)
        found.append(packed_parts(sums, lse, 1)[0])
    check(triton.join(torch.stack(found)), ref.absorbed(q_latent, q[..., P:], cache, meta, SCALE))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("name", ["decode-64", "shared", "shared-verify", "shared-mixed"])
def test_a_captured_step_serves_other_lengths(name: str, heads: int) -> None:
    """Only lengths change between replays, so that contexts end inside the prefix, too. Two layers share one plan."""
    q, cache, meta = build(STEPS[name], heads, 64)
    q_latent = torch.randn(len(q), heads, L, device=DEVICE).div_(8).to(torch.bfloat16)
    triton.absorbed(q_latent, q[..., P:], cache, replace(meta, plans={}), SCALE)
    graph, static = torch.cuda.CUDAGraph(), replace(meta, plans={})
    with torch.cuda.graph(graph):
        first = triton.absorbed(q_latent, q[..., P:], cache, static, SCALE)
        second = triton.absorbed(-q_latent, q[..., P:], cache, static, SCALE)
    assert isinstance(meta.seq_lens, Tensor)
    for shorter in (0, 1, 17):
        meta.seq_lens[: len(STEPS[name].seq_lens)] -= shorter
        first.fill_(float("nan"))
        second.fill_(float("nan"))
        graph.replay()
        check(first, ref.absorbed(q_latent, q[..., P:], cache, meta, SCALE))
        check(second, ref.absorbed(-q_latent, q[..., P:], cache, meta, SCALE))


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("workspace", [16 << 20, triton.WORKSPACE])
@pytest.mark.parametrize("name", ["prompts", "chunk", "mixed"])
@both
def test_expanded(op: Expanded, name: str, workspace: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if op is HOPPER and (why := triton_runtime.missing_hopper()):
        pytest.skip(why)
    monkeypatch.setattr(triton, "WORKSPACE", workspace)
    q, cache, meta = build(STEPS[name], heads, 64)
    up = torch.randn(heads, P + V, L, device=DEVICE).div_(L**0.5).to(torch.bfloat16)
    meta = replace(meta, prompts=sequences(meta))
    expected, out = (torch.full((len(q), heads, V), float("nan"), dtype=q.dtype, device=DEVICE) for _ in range(2))
    ref.expanded(q, up, cache, meta, SCALE, expected)
    close(op.expanded(q, up, cache, meta, SCALE, out), expected)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.15, 0.6])
@pytest.mark.parametrize("name", ["prompts", "chunk", "mixed"])
def test_chosen_rows(name: str, share: float, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not follow each other, absorbed, and expanded in several pieces, of which some rows see nothing."""
    monkeypatch.setattr(triton, "WORKSPACE", 32 << 20)
    q, cache, meta = build(STEPS[name], heads, 64)
    chosen, rows = inputs.choose_rows(q, replace(meta, plans={}), share)
    chosen, q = replace(chosen, prompts=sequences(chosen)), q[rows]
    q_latent = torch.randn(len(q), heads, L, device=DEVICE).div_(8).to(torch.bfloat16)
    found = triton.absorbed(q_latent, q[..., P:], cache, chosen, SCALE)
    check(found, ref.absorbed(q_latent, q[..., P:], cache, chosen, SCALE))
    up = torch.randn(heads, P + V, L, device=DEVICE).div_(L**0.5).to(torch.bfloat16)
    expected, out = (torch.full((len(q), heads, V), float("nan"), dtype=q.dtype, device=DEVICE) for _ in range(2))
    ref.expanded(q, up, cache, chosen, SCALE, expected)
    close(hopper.expanded(q, up, cache, chosen, SCALE, out), expected)


def test_later_tokens_that_are_no_numbers_leave_earlier_ones_alone() -> None:
    """The projection expands what stands for NaN in the cache, and a weight of 0 makes nothing of it."""
    if why := triton_runtime.missing_hopper():
        pytest.skip(why)
    q, cache, meta = build(STEPS["prompts"], 16, 64)
    up, meta = torch.randn(16, P + V, L, device=DEVICE).to(q.dtype), replace(meta, prompts=sequences(meta))
    assert meta.table_rows is not None
    found = []
    for last in (1.0, 1e18):
        where = meta.block_tables[meta.table_rows[0].long(), 511 // 64].long()
        cache.latent[where, 0, 511 % 64] = last
        out = torch.empty(len(q), 16, V, dtype=q.dtype, device=DEVICE)
        found.append(hopper.expanded(q, up, cache, replace(meta, plans={}), SCALE, out))
    assert torch.equal(found[0][:511], found[1][:511]) and torch.equal(found[0][512:], found[1][512:])
    assert not torch.equal(found[0][511], found[1][511])


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@both
def test_expanded_does_not_hide_a_key_that_is_not_finite(op: Expanded, bad: str) -> None:
    """NaN in the same rows and heads as the reference, the row that sees nothing else among them."""
    if op is HOPPER and (why := triton_runtime.missing_hopper()):
        pytest.skip(why)
    q, cache, meta = build(STEPS["prompts"], 16, 64)
    up = torch.randn(16, P + V, L, device=DEVICE).div_(L**0.5).to(torch.bfloat16)
    assert meta.table_rows is not None
    cache.rope[meta.block_tables[meta.table_rows[0].long(), 0].long(), 0, 0, 3] = float(bad)
    meta = replace(meta, prompts=sequences(meta))
    expected, out = (torch.full((len(q), 16, V), float("nan"), dtype=q.dtype, device=DEVICE) for _ in range(2))
    ref.expanded(q, up, cache, meta, SCALE, expected)
    op.expanded(q, up, cache, meta, SCALE, out)
    hidden = expected.isnan().any(-1)
    assert torch.equal(out.isnan().any(-1), hidden) and hidden[0].all()
    close(out[~hidden], expected[~hidden])


def test_expanded_waits_for_nothing() -> None:
    q, cache, meta = build(STEPS["chunk"], 16, 64)
    up, out = (torch.ones(shape, dtype=q.dtype, device=DEVICE) for shape in ((16, P + V, L), (len(q), 16, V)))
    prompts = sequences(meta)
    triton.expanded(q, up, cache, replace(meta, prompts=prompts, plans={}), SCALE, out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton.expanded(q, up, cache, replace(meta, prompts=prompts, plans={}), SCALE, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["decode-64", "mixed", "shared", "shared-mixed"])
@torch.inference_mode()
def test_a_layer_can_be_captured(name: str) -> None:
    """A graph gives the layer's results; absorbed and expanded attention agree; one projection gives all queries."""
    config = {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "kv_lora_rank": L,
        "qk_nope_head_dim": P,
        "qk_rope_head_dim": R,
        "v_head_dim": V,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "intermediate_size": 8,
        "max_position_embeddings": 40_000,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
    }
    args = parse_checkpoint_config(config)
    small = select_kernels("cuda", "bfloat16")
    kernels = Kernels(choices=small.choices, norm=small.norm, linear=small.linear, latent=triton)
    params = layout(args)
    build_of = Build(
        torch.bfloat16,
        DEVICE,
        kernels,
        {param.name: param for param in params},
        linear_plans(args, params, small.choices),
    )
    layer, branch = (
        LatentAttention(latent_of(args), "layers.0.attention", args.norm, build_of),
        Branch("attention", args.layers[0], structs.replace(args.norm, eps=1e-6), build_of),
    )
    fill_layer(layer, build_of, lambda raw: torch.randn(raw.shape) * (0.03 if len(raw.shape) > 1 else 1))
    assert branch.before is not None
    branch.before.take({"weight": torch.randn(2048).to(DEVICE, torch.bfloat16)}, 0)
    _, cache, meta = build(STEPS[name], 16, 64)
    prompts, tokens = sequences(meta), sum(STEPS[name].query_lens)
    assert meta.table_rows is not None
    ends = [
        (int(meta.block_tables[meta.table_rows[s]][at // 64]) * 64 + at % 64, at)
        for first, last, s, past in prompts
        for at in range(past, past + last - first)
    ]
    slots, positions = torch.tensor(ends, device=DEVICE).unbind(1)
    meta = replace(meta, kv_slots=slots.contiguous(), prompts=())
    hidden = torch.randn(tokens, 2048, device=DEVICE, dtype=torch.bfloat16)
    rotation = Rotaries(args.rotations, DEVICE).rows(positions, torch.bfloat16)

    def run(given: AttentionMeta) -> Tensor:
        ctx = StepContext(positions, (replace(given, plans={}),), [])
        return layer.forward(hidden.clone(), branch, rotation, ctx, cache)  # not by its call, which has no types

    expected = run(meta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(meta)
    out.zero_()
    graph.replay()
    assert out.isfinite().all()
    close(out, expected)
    layer.most_absorbed = 0.0
    close(run(replace(meta, prompts=prompts)), expected)
