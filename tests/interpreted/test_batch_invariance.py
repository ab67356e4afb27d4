"""`--batch-invariant` on a GPU, in Triton's interpreter: a row has the same bits alone, in a batch, in any chunk."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import parse_checkpoint_config
from quire.kernels import triton_runtime
from quire.kernels.attention import AttentionMeta, KVView, inputs, ref
from quire.kernels.attention.inputs import Case

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from quire.kernels.activation import cpu as activation
from quire.kernels.experts import ref as experts_ref
from quire.kernels.invariant import attention, experts, heads, linear
from quire.kernels.select import KernelNeeds, select_kernels
from quire.kernels.supports import FIXED_ORDER
from quire.layers.context import Build, StepContext
from quire.layers.decoder import Decoder
from quire.layers.stack import embedded, run_layers
from quire.plan.experts import moe_plans
from quire.plan.kinds.blocks import operations, score_features
from quire.plan.kv_geometry import rank_geometry
from quire.plan.layout import alone, layout
from quire.plan.linears import linear_plans

from ..support.filled_models import fill, normal
from ..support.full import full_rows, only_full
from ..unit.worker.test_batch_invariance import BASE, MODELS

CASES: list[tuple[Case, dict[str, Any]]] = [
    (Case((1, 1, 30), (600, 129, 300), heads=(4, 1), head_dim=32, block_size=48), {"window": 100, "soft_cap": 3.0}),
    *full_rows(
        [
            (Case((130, 1, 70), (260, 529, 70), heads=(4, 2), head_dim=64, block_size=64), {}),
            (Case((1, 1, 3), (600, 129, 300), heads=(4, 1), head_dim=24), {"sinks": torch.linspace(-2, 6, 4)}),
            (Case((1, 1, 30), (600, 129, 300), heads=(4, 1), head_dim=32, block_size=64), {"window": -100}),
        ]
    ),
]
TYPES = [torch.float32, *full_rows([torch.float16])]


@pytest.mark.parametrize("decode_len", [1, *full_rows([3])])
@pytest.mark.parametrize(("case", "more"), CASES, ids=lambda one: "")
def test_attention_matches_the_reference(case: Case, more: dict[str, Any], decode_len: int) -> None:
    q, kv, meta = inputs.make(case, torch.float32)
    expected = ref.paged_attention(q, kv, meta, 0.3, **more)
    found = attention.paged_attention(q, kv, replace(meta, decode_len=decode_len, plans={}), 0.3, **more)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


MORE: list[dict[str, Any]] = [{"window": 300, "sinks": torch.tensor([0.5, 1.0])}, *full_rows([{}, {"window": -96}])]


def rows_of(q: Tensor, kv: KVView, meta: AttentionMeta, chunks: list[tuple[int, int, int]], **more: Any) -> Tensor:
    """The attention of chunks (sequence, tokens before, tokens) of sequences whose rows are all in q."""
    starts = meta.query_start.tolist()
    rows = torch.cat([torch.arange(starts[s] + first, starts[s] + first + count) for s, first, count in chunks])
    lengths = [first + count for _, first, count in chunks]
    step = AttentionMeta(
        query_start=torch.tensor([0, *(count for *_, count in chunks)]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=meta.block_tables,
        kv_slots=meta.kv_slots,
        table_rows=torch.tensor([s for s, *_ in chunks], dtype=torch.int32),
        max_query_len=max(count for *_, count in chunks),
        decode_len=more.pop("decode_len", 1),
    )
    found = torch.full_like(q, torch.nan)
    found[rows] = attention.paged_attention(q[rows], kv, step, 0.2, **more)
    return found


STEPS: list[list[tuple[int, int, int]]] = [
    [(0, 600, 1), (1, 89, 1)],
    [(0, 511, 1)],
    [(0, 37, 100), (1, 5, 3)],
    *full_rows([[(0, 37, 300), (1, 5, 3)], [(1, 30, 60), (0, 480, 121)], [(0, 299, 40)]]),
]


@pytest.mark.parametrize("more", MORE, ids=str)
def test_attention_has_the_same_bits_in_any_chunk_and_batch(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes divided and whole, chunks that begin and end anywhere, drafts, and the whole prompt."""
    case = Case((601, 90), (601, 90), heads=(2, 1), head_dim=32, block_size=64)
    q, kv, meta = inputs.make(case, torch.float32)
    whole = rows_of(q, kv, meta, [(0, 0, 601), (1, 0, 90)], **more)
    assert whole.isfinite().all()
    for chunks in STEPS:
        for divided in (True, False):
            monkeypatch.setattr(attention, "SCRATCH", 64 << 20 if divided else 0)
            found = rows_of(q, kv, meta, chunks, **more)
            there = found.isfinite()
            assert there.sum() == sum(count for *_, count in chunks) * 64
            assert torch.equal(found[there], whole[there]), (chunks, divided)
    drafts = rows_of(q, kv, meta, [(0, 597, 4), (1, 86, 4)], decode_len=4, **more)
    assert torch.equal(drafts[drafts.isfinite()], whole[drafts.isfinite()])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TYPES)
def test_products_have_the_same_bits_with_any_number_of_rows(dtype: torch.dtype) -> None:
    x, weight, bias = numbers(150, 200).to(dtype), numbers(90, 200, seed=1).to(dtype), numbers(90, seed=2).to(dtype)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "run": lambda x, r: linear.run(x, weight, bias),
        "float": lambda x, r: linear.run_float(x, weight, None),
        "add": lambda x, r: linear.run_add(x, weight, None, r.clone()),
        "gated": lambda x, r: linear.run_gated(x, weight, bias),
    }
    residual = numbers(150, 90, seed=3).to(dtype)
    for name, way in ways.items():
        whole = way(x, residual)
        assert torch.allclose(whole[:, :45].float(), EXPECTED[name](x, weight, bias, residual), atol=0.1, rtol=1e-2), (
            name
        )
        for first, count in ((0, 1), (7, 5), (3, 64), (20, 100), (149, 1)):
            some = way(x[first : first + count], residual[first : first + count])
            assert torch.equal(some, whole[first : first + count]), (name, first, count)


EXPECTED: dict[str, Callable[..., Tensor]] = {
    "run": lambda x, w, b, r: (x.float() @ w.float().T + b.float())[:, :45],
    "float": lambda x, w, b, r: (x.float() @ w.float().T)[:, :45],
    "add": lambda x, w, b, r: (r.float() + x.float() @ w.float().T)[:, :45],
    "gated": lambda x, w, b, r: activation.gated((x.float() @ w.float().T + b.float()), "silu"),
}


@pytest.mark.parametrize("dtype", TYPES)
def test_experts_have_the_same_bits_with_any_tokens(dtype: torch.dtype) -> None:
    gate_up, down, x = numbers(4, 96, 64), numbers(4, 64, 48, seed=1), numbers(140, 64, seed=2).to(dtype)
    packed = experts.empty(4, gate_up[0].to(dtype), down[0].to(dtype), torch.device("cpu"))
    for place in range(4):
        experts.put(packed, place, gate_up[place].to(dtype) * 0.1, down[place].to(dtype) * 0.1)
    ids = numbers(140, 4, seed=3).topk(2).indices.int()
    weights = numbers(140, 2, seed=4).sigmoid()
    whole = experts.run(x, weights, ids, packed, residual=x.clone())
    exact = packed._replace(gate_up=packed.gate_up.float(), down=packed.down.float())
    expected = experts_ref.run(x.float(), weights, ids, exact, residual=x.float())
    torch.testing.assert_close(whole.float(), expected, rtol=1e-2, atol=2e-2)
    for first, count in ((0, 1), (9, 3), (30, 40), (100, 40)):
        some = slice(first, first + count)
        assert torch.equal(
            experts.run(x[some], weights[some], ids[some], packed, residual=x[some].clone()), whole[some]
        )


def test_heads_have_as_many_rows_in_every_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the sum of a head's squares would be divided among threads in another way in steps of many rows."""
    seen = set()
    monkeypatch.setattr(heads, "launch", lambda *given: seen.add(given[-1]))
    for tokens in (1, 700):
        page = torch.zeros(50, 2, 16, 32)
        qkv, kv = numbers(tokens, 12, 32), KVView(page, page.clone())
        heads.prepare(qkv, None, 1e-6, qkv, qkv, kv, torch.arange(tokens))
    assert len(seen) == 1


COMPILED: dict[str, set[str]] = {
    "main": {"_plan_kernel", "_attend_kernel"},
    "products": {"hopper._few_kernel", "hopper._many_kernel"},
    "elsewhere": {"_tile_kernel"},
}


@pytest.mark.parametrize("part", COMPILED)
def test_compiles(part: str, compiled: Callable[..., set[str]]) -> None:
    assert compiled("compile_invariant", part) == COMPILED[part]


def decoder(kind: str) -> Decoder:
    """A model with the kernels of a GPU."""
    args = parse_checkpoint_config(BASE | MODELS[kind] | {"model_type": kind})
    needs = KernelNeeds(device="cuda", dtype="float32", features=frozenset({FIXED_ORDER}))
    kernels = select_kernels(
        "cuda", "float32", ops=operations(args), head_dim=24, attention_features=score_features(args) | needs.features
    )
    moe = moe_plans(args, needs).get("decode")
    assert not isinstance(moe, str), moe
    params, cpu = layout(args), torch.device("cpu")
    plans = linear_plans(args, params, kernels.choices)
    groups = rank_geometry(args, alone(args), dtype="float32", device="cpu", block_size=16).groups
    build = Build(torch.float32, cpu, kernels, {one.name: one for one in params}, plans, moe=moe, kv_groups=groups)
    model = Decoder(args, params, build)
    fill(model, normal(0.3))
    return model


CHUNKS: list[list[list[tuple[int, int, int]]]] = [
    [[(0, 0, 300), (1, 0, 20)]],
    [[(0, 0, 7)], [(0, 7, 292), (1, 0, 19)], [(1, 19, 1), (0, 299, 1)]],
    [[(1, 0, 20), (0, 0, 250)], [(0, 250, 50)]],
]


@only_full
@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_layers_have_the_same_bits_in_every_schedule(kind: str) -> None:
    model, ids = decoder(kind), [numbers(n).mul(20).long() % 64 for n in (300, 20)]
    own, found = next(layer.attention for layer in model.layers), list[list[Tensor]]()
    tables = torch.arange(1, 41, dtype=torch.int32).view(2, 20)
    for steps in CHUNKS:
        kv = [KVView(*torch.zeros(2, 41, own.num_kv_heads, 16, own.head_dim)) for _ in model.layers]
        logits = [torch.full((len(one), 64), torch.nan) for one in ids]
        for chunks in steps:
            where = [(s, p) for s, first, count in chunks for p in range(first, first + count)]
            metas = tuple(
                AttentionMeta(
                    query_start=torch.tensor([0, *(count for *_, count in chunks)]).cumsum(0).int(),
                    seq_lens=torch.tensor([first + count for _, first, count in chunks], dtype=torch.int32),
                    block_tables=tables[[s for s, *_ in chunks]],
                    kv_slots=torch.tensor([int(tables[s, p // 16]) * 16 + p % 16 for s, p in where]),
                    kv_group=group,
                )
                for group in range(1 + max(layer.attention.group for layer in model.layers))
            )
            tokens = torch.cat([ids[s][first : first + count] for s, first, count in chunks])
            hidden, ctx = embedded(model, tokens, StepContext(torch.tensor([p for _, p in where]), metas, kv))
            rows = model.head(model.norm(run_layers(model, hidden, ctx)))
            for (s, first, count), part in zip(chunks, rows.split([count for *_, count in chunks]), strict=True):
                logits[s][first : first + count] = part
        found.append(logits)
    for logits in found:
        assert all(one.isfinite().all() for one in logits)
        assert all(torch.equal(one, other) for one, other in zip(logits, found[0], strict=True))
