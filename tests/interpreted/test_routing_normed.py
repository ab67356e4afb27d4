"""Norm, router and choice of experts in one kernel, in Triton's interpreter."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import parse_checkpoint_config
from quire.args.experts import Routing
from quire.contracts.scheme import Scheme
from quire.kernels import triton_runtime
from quire.kernels.experts import scaled
from quire.kernels.experts import triton as experts
from quire.kernels.experts.sorted_ids import SortedIds
from quire.kernels.norm import ref as norm
from quire.kernels.quantize.triton import GROUP, quantize
from quire.kernels.routing import ref, triton_normed
from quire.kernels.routing.inputs import DEEPSEEK_V2, DEEPSEEK_V3, QWEN3
from quire.kernels.select import select_kernels
from quire.layers.context import Build, StepContext
from quire.layers.decoder import Decoder, DecoderBlock
from quire.plan.kinds.blocks import operations
from quire.plan.layout import layout
from quire.plan.linears import linear_plans

from ..support.filled_models import experts_plan, fill, normal
from ..support.launches import launches
from ..support.quantized_cases import make_matrix
from ..support.tiny_models import Tiny, tiny_config

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

SIGMOID = Routing(num_experts=12, top_k=3, scoring="sigmoid", correction=True, normalize=True)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make(plan: Routing, rows: int, columns: int, *, exact: bool, biased: bool) -> tuple[Tensor, triton_normed.Scored]:
    """Return random rows [rows, columns] bfloat16, and the arguments of a router."""
    torch.manual_seed(rows + columns)
    x = (3 * torch.randn(rows, columns)).bfloat16()
    scored = triton_normed.Scored(
        (torch.rand(columns) + 0.5).bfloat16(),
        1e-6,
        (torch.randn(plan.num_experts, columns) * 2 * columns**-0.5).bfloat16(),
        torch.randn(plan.num_experts).bfloat16() if biased else None,
        triton_normed.empty_counters(x.device),
        exact,
        torch.randn(plan.num_experts) if plan.correction else None,
        torch.rand(plan.num_experts) + 0.5 if biased else None,
    )
    return x, scored


@pytest.mark.parametrize(
    ("plan", "rows", "columns", "exact", "biased"),
    [
        (QWEN3, 1, 256, False, False),
        (QWEN3, 16, 256, False, False),
        (DEEPSEEK_V3, 3, 384, True, False),
        (DEEPSEEK_V2, 2, 136, True, True),
        (SIGMOID, 5, 40, True, True),
    ],
)
def test_as_norm_product_and_choice(plan: Routing, rows: int, columns: int, exact: bool, biased: bool) -> None:
    """The three operations give the same rows and weights, to the last bits of sums, and the same experts."""
    x, scored = make(plan, rows, columns, exact=exact, biased=biased)
    y, narrow, weights, ids = triton_normed.route(x, scored, plan)
    assert narrow is None and isinstance(ids, Tensor)
    torch.testing.assert_close(y, norm.rms_norm(x, scored.norm, scored.eps), rtol=8e-3, atol=0)
    logits = y.float() @ scored.weight.float().t() + (0 if scored.bias is None else scored.bias.float())
    given = logits if exact else logits.bfloat16()
    wanted, chosen = ref.route(given, scored.correction, plan, None, scored.expert_scale)
    if exact:
        assert torch.equal(ids, chosen)
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-6)
    else:  # sums of another order round to neighbours
        best, found = (given.gather(1, one.long()).float() for one in (chosen, ids))
        torch.testing.assert_close(found, best, rtol=1e-2, atol=0)
        torch.testing.assert_close(weights, wanted, rtol=5e-2, atol=1e-6)
    assert not scored.counters.any(), "the next step counts from 0"


def test_again_the_same_bits_and_rows_that_are_not_live() -> None:
    x, scored = make(QWEN3, 4, 256, exact=True, biased=False)
    live = torch.tensor([True, False, True, False])
    first, second = (triton_normed.route(x, scored, QWEN3, live) for _ in range(2))
    for one, other in zip(first[2:], second[2:], strict=True):
        assert torch.equal(one, other)
    assert (first[3] < 0).all(1).tolist() == (~live).tolist()


def test_ties_and_no_numbers() -> None:
    """Of equal scores the lower number comes first; NaN chooses different experts."""
    x, scored = make(QWEN3, 2, 256, exact=True, biased=False)
    scored.weight.zero_()
    x[1] = float("nan")
    _, _, weights, ids = triton_normed.route(x, scored, QWEN3)
    assert isinstance(ids, Tensor) and ids[0].tolist() == list(range(8)) and len(set(ids[1].tolist())) == 8
    torch.testing.assert_close(weights[0], torch.full([8], 0.125))
    assert weights[1].isnan().all()


@pytest.mark.parametrize("plan", [QWEN3, SIGMOID])
def test_sorted_pairs(plan: Routing) -> None:
    """Order and starts are those of the kernel that sorts, also with rows that choose no experts; then again."""
    x, scored = make(plan, 6, 256, exact=True, biased=False)
    live = torch.tensor([True, False, True, True, False, True])
    for _ in range(2):
        ids = triton_normed.route(x, scored, plan, live, triton_normed.Forms(sorts=True))[3]
        assert isinstance(ids, SortedIds) and ids.ids.shape == (6, plan.top_k)
        order, starts = experts._sort(ids.ids, None, plan.num_experts)
        assert torch.equal(ids.starts, starts)
        assert torch.equal(ids.order[: starts[-1]], order[: starts[-1]])
        assert not scored.counters.any()


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("rows", [1, 16])
def test_eight_bits(rows: int, powers: bool) -> None:
    """Codes and scales have the bits that `quantize` makes of the normed rows."""
    x, scored = make(QWEN3, rows, 384, exact=False, biased=False)
    y, narrow, _, _ = triton_normed.route(x, scored, QWEN3, None, triton_normed.Forms(eight_bits=True, powers=powers))
    codes, scales = quantize(y, GROUP, powers=powers)
    assert narrow is not None and narrow.scales.shape == (rows, 3)
    assert torch.equal(narrow.values.view(torch.uint8), codes[:rows].view(torch.uint8))
    assert torch.equal(narrow.scales, scales[:, :rows].t())


def made_block(family: str, **changes: int) -> DecoderBlock:
    """Return a layer with experts of a random model in bfloat16, with the kernels of a GPU."""
    args = parse_checkpoint_config(tiny_config(Tiny(family=family)) | changes)
    ops = operations(args)
    kernels = select_kernels("cuda", "bfloat16", ops=ops, head_dim=max(one.head_dim for one in args.attending))
    params = layout(args)
    linears = linear_plans(args, params, kernels.choices)
    moe = experts_plan(args, "bfloat16", "cuda", "")
    named = {param.name: param for param in params}
    model = Decoder(args, params, Build(torch.bfloat16, torch.device("cpu"), kernels, named, linears, moe=moe))
    fill(model, normal(0.1))
    return next(layer for layer in model.layers if layer.experts is not None)


def compare(block: DecoderBlock, rows: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compare a block's experts with the separate kernels. Return the number of launches that are saved."""
    assert block.mlp is not None and block.experts is not None
    x = torch.randn(rows, block.experts.hidden_size).bfloat16()
    ctx = StepContext(torch.arange(rows), (), [])
    found, counts = [], []
    for enabled in (False, True):
        monkeypatch.setattr(triton_normed, "ENABLED", enabled)
        with torch.inference_mode(), launches() as made:
            found.append(block.mlp(x.clone(), block.mlp_branch, ctx))
        counts.append(made.total())
    left = [made[f"_{name}_kernel"] for name in ("norm", "route", "sort", "quantize")]
    assert made["_normed_kernel"] == 1 and not any(left), made
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2 * float(found[0].float().abs().max()))
    return counts[0] - counts[1]


@pytest.mark.parametrize(
    ("family", "rows", "saved"), [("qwen3_moe", 1, 2), ("qwen3_moe", 4, 2), ("qwen3_moe", 8, 3), ("deepseek_v2", 1, 2)]
)
def test_layer(family: str, rows: int, saved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with experts gives the results of the separate kernels, with fewer launches."""
    assert compare(made_block(family), rows, monkeypatch) == saved


@pytest.mark.parametrize(("rows", "saved"), [(1, 2), (6, 4)])
def test_layer_of_eight_bits(rows: int, saved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of FP8 blocks get their rows in 8 bits."""
    block = made_block("qwen3_moe", hidden_size=128)
    own = block.experts.experts
    scheme = Scheme(values="e4m3", block=(128, 128), inputs="group")
    cpu, count = torch.device("cpu"), own.num_experts
    pairs = [(make_matrix(scheme, 256, 128, cpu), make_matrix(scheme, 128, 128, cpu)) for _ in range(count)]
    own.kernel, own.packed = scaled, scaled.empty(count, *pairs[0], cpu)
    for place, pair in enumerate(pairs):
        scaled.put(own.packed, place, *pair)
    own.schemes = {"gate_up": scheme, "down": scheme}
    own.plan = replace(own.plan, features=("quantized rows", "sorted ids"))
    assert compare(block, rows, monkeypatch) == saved
