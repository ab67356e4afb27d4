"""Shared experts in the kernels of a few routed pairs, in Triton's interpreter: these kernels, and layers."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.contracts.parallel import Parallel
from quire.distributed.mesh import RankGroups
from quire.kernels import triton_runtime
from quire.kernels.activation import UNGATED
from quire.kernels.activation import ref as activation
from quire.kernels.experts import hopper, triton
from quire.kernels.experts.inputs import Case, make, packed_by
from quire.kernels.experts.weights import activated
from quire.kernels.experts_plan import MOST_SHARED
from quire.kernels.select import select_kernels
from quire.layers.context import Build, StepContext
from quire.layers.linear import PackedLinear
from quire.layers.moe import BESIDE, MoE
from quire.plan.kinds.blocks import operations
from quire.plan.layout import layout
from quire.plan.linears import linear_plans
from quire.plan.placement import ranks

from ..support.changed_args import with_experts
from ..support.filled_models import experts_plan, fill_layer, normal
from ..support.launches import launches
from ..support.tiny_models import Tiny, tiny_config

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # relative to the largest value
FEW = {"_few_up_kernel": 1, "_few_down_kernel": 1}
CTX = StepContext(torch.arange(0), (), [])


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.set_deterministic_debug_mode("error")
    torch.manual_seed(0)
    yield
    torch.set_deterministic_debug_mode("default")


def close(actual: Tensor, expected: Tensor) -> None:
    bound = TOLERANCE[actual.dtype] * max([1.0, *expected.abs().flatten().tolist()])
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=bound)


def by_hand(
    x: Tensor, weights: Tensor, ids: Tensor, experts: tuple[Tensor, Tensor], shared: tuple[Tensor, Tensor], act: str
) -> Tensor:
    """Routed and shared experts in float64, token by token. An id of -1 adds nothing."""

    def one(row: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return down.double() @ activated((gate_up.double() @ row)[None], act, activation.gated)[0]

    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(x.double()):
        y[t] = one(row, *shared)
        for weight, expert in zip(weights[t].double(), ids[t].tolist(), strict=True):
            if expert >= 0:
                y[t] += weight * one(row, experts[0][expert], experts[1][expert])
    return y


def shared_weights(hidden: int, size: int, dtype: torch.dtype, act: str = "silu") -> tuple[Tensor, Tensor]:
    rows = size if act in UNGATED else 2 * size
    return (torch.randn(rows, hidden) * hidden**-0.5).to(dtype), (torch.randn(hidden, size) * size**-0.5).to(dtype)


@pytest.mark.parametrize(
    ("case", "size", "dtype", "act"),
    [
        (Case(1, 4, 2, 72, 24), 24, torch.float32, "silu"),
        (Case(1, 8, 6, 520, 24), 48, torch.bfloat16, "silu"),
        (Case(1, 3, 3, 16, 264), 528, torch.float32, "silu"),
        (Case(2, 8, 8, 72, 40), 40, torch.float16, "gelu_tanh"),
        (Case(3, 8, 3, 40, 16), 56, torch.float32, "silu"),
        (Case(MOST_SHARED, 5, 1, 40, 24, "one"), 48, torch.float32, "silu"),
        (Case(MOST_SHARED, 4, 2, 48, 8), 104, torch.float32, "silu"),
        (Case(3, 4, 2, 48, 24), 48, torch.float32, "relu2"),
    ],
    ids=str,
)
def test_they_are_one_sum(case: Case, size: int, dtype: torch.dtype, act: str) -> None:
    """With and without a residual, and with rows that have no expert; whole, and as two ranks have halves of both."""
    x, weights, ids, gate_up, down = make(case, dtype)
    gate_up = gate_up[:, : case.inner] if act in UNGATED else gate_up
    packed, shared = packed_by(triton, gate_up, down, act), shared_weights(case.hidden, size, dtype, act)
    residual, before = torch.randn_like(x), x.clone()
    expected = by_hand(x, weights, ids, (gate_up, down), shared, act)
    with launches() as made:
        found = triton.run_shared(x, (weights, ids, None), packed, None, shared)
    close(found, expected)
    assert made == FEW
    given = residual.clone()
    found = hopper.run_shared(x, (weights, ids, None), packed, given, shared)
    close(found, residual.double() + expected)
    assert found.data_ptr() == given.data_ptr() and torch.equal(x, before)
    ids[-1] = -1
    expected = by_hand(x, weights, ids, (gate_up, down), shared, act)
    close(triton.run_shared(x, (weights, ids, None), packed, None, shared), expected)
    wide = torch.cat((x, torch.full_like(x, torch.nan)), 1)[:, : case.hidden]
    close(triton.run_shared(wide, (weights, ids, None), packed, None, shared), expected)
    if act in UNGATED:
        return
    parts = []
    for rank in range(2):
        (first, one), (second, two) = (
            (up.unflatten(-2, (2, 2, -1))[..., rank, :, :].flatten(-3, -2), to.chunk(2, -1)[rank].contiguous())
            for up, to in ((gate_up, down), shared)
        )
        own = packed_by(triton, first, one, act)
        parts.append(triton.run_shared(x, (weights, ids, None), own, None, (second, two)).double())
    close((parts[0] + parts[1]).to(dtype), expected)


def test_a_token_depends_on_nothing_but_itself() -> None:
    x, weights, ids, gate_up, down = make(Case(4, 4, 2, 32, 16), torch.float32)
    packed, shared = packed_by(triton, gate_up, down), shared_weights(32, 32, torch.float32)
    expected = triton.run_shared(x, (weights, ids, None), packed, None, shared)
    x[2] = torch.nan
    found = triton.run_shared(x, (weights, ids, None), packed, None, shared)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
    assert triton.run_shared(x[:0], (weights[:0], ids[:0], None), packed, None, shared).shape == (0, 32)


def arguments(family: str = "deepseek_v2", **changes: Any) -> ModelArgs:
    return with_experts(parse_checkpoint_config(tiny_config(Tiny(family=family))), **changes)


def layer_of(args: ModelArgs, dtype: str = "float32", kernel: str = "triton", **more: Any) -> MoE:
    """A random layer with experts, of the kernels of a GPU."""
    kernels = select_kernels("cuda", dtype, ops=operations(args), head_dim=args.attending[0].head_dim)
    params = more.pop("params", None) or layout(args, experts=more.get("experts"))
    assert args.moe is not None
    build = Build(
        getattr(torch, dtype),
        torch.device("cpu"),
        kernels,
        {param.name: param for param in params},
        linear_plans(args, params, kernels.choices),
        moe=experts_plan(args, dtype, "cuda", kernel),
        **more,
    )
    made = MoE(args.moe, f"layers.{min(args.expert_layers)}.mlp", args.hidden_size, build)
    torch.manual_seed(1)
    fill_layer(made, build, normal(0.3))
    return made


def added(layer: MoE, tokens: int, ctx: StepContext = CTX) -> tuple[Tensor, Counter[str]]:
    """The layer's output in a step, and the launches."""
    x = torch.randn(tokens, layer.hidden_size, generator=torch.Generator().manual_seed(tokens)).to(layer.dtype)
    with torch.inference_mode(), launches() as made:
        y = layer.added(x, x, x.clone(), ctx)
    return y, made


ALONE = {"linear": 1, "addmm_": 1}  # two products of shared experts, and between them an activation


def apart(layer: MoE, tokens: int, ctx: StepContext = CTX) -> tuple[Tensor, Counter[str]]:
    """`added` of a layer whose shared experts have launches of their own."""
    kept, layer.most_shared = layer.most_shared, 0
    found = added(layer, tokens, ctx)
    layer.most_shared = kept
    return found


@pytest.mark.parametrize("tokens", [1, 2, MOST_SHARED, MOST_SHARED + 1])
@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe", "nemotron_moe"])
def test_a_layer_of_few_tokens_has_no_launch_for_shared_experts(family: str, tokens: int) -> None:
    layer = layer_of(arguments(family))
    (found, made), (expected, before) = added(layer, tokens), apart(layer, tokens)
    close(found, expected)
    between = "_pointwise_kernel" if family == "nemotron_moe" else "_gated_kernel"
    assert before - made == (ALONE | {between: 1} if tokens <= MOST_SHARED else {}) and not made - before


def test_what_is_routed_can_be_seen_and_replaced() -> None:
    """Rows that are not live have shared experts alone; ids become slots before they reach the kernel."""
    layer, seen = layer_of(arguments()), list[tuple[Tensor, Tensor]]()
    ctx = replace(CTX, live=torch.tensor([True, False, True]))
    layer.on_routing = lambda *given: seen.append(given)
    (found, made), (expected, before) = added(layer, 3, ctx), apart(layer, 3, ctx)
    close(found, expected)
    assert made != before and all(torch.equal(*pair) for pair in zip(*seen, strict=True))
    assert seen[0][1].shape == (3, layer.top_k) and (seen[0][1] < 0).all(1).tolist() == [False, True, False]
    weights, ids = seen[0][0], torch.zeros_like(seen[0][1])
    layer.choose = lambda x, live: (weights, ids)
    replaced, _ = added(layer, 3)
    close(replaced, apart(layer, 3)[0])
    assert not torch.equal(replaced, found)


class PartialSums:
    """A group of ranks whose sum is left to the test."""

    def add(self, partial: Tensor, residual: Tensor) -> Tensor:
        return residual + partial


def test_ranks_with_slices_of_all_experts() -> None:
    """Each has a half of every expert, and of the shared experts. Ranks with whole experts run shared experts alone."""
    args = arguments()
    for parallel, joined in ((Parallel(tp=2), True), (Parallel(tp=2, experts=True), False)):
        for rank in ranks(args, parallel):
            own = None if joined else tuple(rank.expert_ids)
            group = RankGroups(tp=PartialSums())  # type: ignore[arg-type]
            layer = layer_of(args, params=list(layout(args, rank)), experts=own, groups=group)
            (found, made), (expected, before) = added(layer, 2), apart(layer, 2)
            close(found, expected)
            assert (made != before) == joined, made


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layer_of(arguments("qwen2_moe")),
        lambda: layer_of(arguments("llama4_text")),
        lambda: layer_of(arguments(), kernel="ref"),
        lambda: layer_of(arguments("qwen3_moe")),
    ],
    ids=["gate of the shared experts", "weighed inputs", "reference", "no shared experts"],
)
def test_layers_whose_shared_experts_run_alone(layer: Callable[[], MoE]) -> None:
    made = layer()
    assert made.most_shared == 0
    assert made._shared_weights(0, CTX) is made._shared_weights(1, CTX) is None


def test_other_layouts_of_shared_experts_run_alone() -> None:
    """A kernel that does not keep the matrix as it is, which quantized ones are among; a bias."""
    layer = layer_of(arguments())
    assert layer.shared is not None and layer.most_shared == MOST_SHARED == BESIDE.start - 1
    for one in (layer.shared.gate_up, layer.shared.down):
        features, one.features = one.features, tuple(word for word in one.features if word != "plain")
        assert layer._most_shared() == 0
        one.features = features
        packed, one.packed = one.packed, PackedLinear(one.packed.weight, torch.zeros(one.out_features))
        assert layer._shared_weights(1, CTX) is None
        one.packed = packed
    assert layer._shared_weights(1, CTX) is not None
    layer.experts.in_place = False  # quantized, or biased
    assert layer._most_shared() == 0


def test_some_steps_run_shared_experts_alone() -> None:
    """With adapters; with each operation by itself, as for a trace; once experts move between ranks."""
    layer = layer_of(arguments())
    rows: Any = object()
    for ctx in (replace(CTX, adapters=rows), replace(CTX, apart=True)):
        assert layer._shared_weights(1, ctx) is None
    before = apart(layer, 2)[1]
    assert added(layer, 2, replace(CTX, apart=True))[1] == before != added(layer, 2)[1]
    num = layer.experts.num_experts
    layer.balance(None, range(num), num)  # type: ignore[arg-type]
    assert added(layer, 2)[1] == before
