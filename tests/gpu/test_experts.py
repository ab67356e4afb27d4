"""Routing and experts on a GPU against their references, at the shapes of real models."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.args.experts import Routing
from quire.kernels import pdl, triton_runtime
from quire.kernels.activation import ACTS
from quire.kernels.experts import grouped, ref
from quire.kernels.experts.form import ExpertForm
from quire.kernels.experts.inputs import Case, make, make_biases, packed_by
from quire.kernels.experts.weights import ExpertWeights
from quire.kernels.routing import inputs as routing_inputs
from quire.kernels.routing import ref as routing_ref
from quire.kernels.routing import uniform
from quire.kernels.routing.inputs import DEEPSEEK_V2, DEEPSEEK_V3, QWEN3

if triton_runtime.missing() or triton_runtime.INTERPRETED:
    pytest.skip(triton_runtime.missing() or "kernels are interpreted", allow_module_level=True)

from quire.kernels.experts import hopper, triton
from quire.kernels.routing import triton as routing

SHAPES = ((128, 8, 2048, 768), (64, 6, 2048, 1408), (8, 2, 1024, 3584), (5, 3, 200, 136))  # E, k, H, I


@pytest.fixture(autouse=True, params=[False, True], ids=["alone", "dependent"])
def launch_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without and with programmatic dependent launch; memory is NaN until it is written."""
    monkeypatch.setattr(pdl, "ENABLED", request.param)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def close(actual: Tensor, expected: Tensor, bound: float = 1e-2) -> None:
    assert actual.shape == expected.shape
    actual, expected = actual.double(), expected.double()
    assert float((actual - expected).norm() / expected.norm().clamp_min(1e-30)) < bound
    assert float((actual - expected).abs().max()) <= 3 * bound * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 3000])
@pytest.mark.parametrize("plan", [QWEN3, DEEPSEEK_V3, DEEPSEEK_V2], ids=["qwen3", "deepseek-v3", "deepseek-v2"])
def test_routing(device: torch.device, plan: Routing, tokens: int) -> None:
    logits, bias = routing_inputs.make(plan, tokens, "negative", "cuda", tokens)
    for given in (logits, logits.bfloat16()):
        weights, ids = routing.route(given, bias, plan)
        expected, wanted = routing_ref.route(given, bias, plan)
        assert float((ids != wanted).float().mean()) < 1e-4 if tokens else ids.shape == (0, plan.top_k)
        torch.testing.assert_close(weights.sort(1).values, expected.sort(1).values, rtol=2e-6, atol=1e-6)
    if plan is QWEN3:
        ties, _ = routing_inputs.make(plan, tokens, "ties", "cuda", tokens)
        assert torch.equal(routing.route(ties, None, plan)[1], routing_ref.route(ties, None, plan)[1])


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16, 63, 200, 1000, 5000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts(device: torch.device, shape: tuple[int, int, int, int], tokens: int) -> None:
    """All experts with a residual, in whose memory the result is; then those of one rank of two."""
    experts, k, hidden, inner = shape
    x, weights, ids, gate_up, down = make(Case(tokens, experts, k, hidden, inner), torch.bfloat16, "cuda")
    residual = torch.randn_like(x)
    expected = ref.run(x, weights, ids, ExpertWeights(gate_up, down), None, residual)
    packed = packed_by(triton, gate_up, down)
    given = residual.clone()
    found = triton.run(x, weights, ids, packed, None, given)
    close(found, expected)
    assert found.data_ptr() == given.data_ptr()
    own = torch.arange(experts, device=device)[1::2]
    places = torch.full((experts,), -1, dtype=torch.int32, device=device)
    places[own] = torch.arange(len(own), dtype=torch.int32, device=device)
    part = ExpertWeights(gate_up[own], down[own])
    expected = ref.run(x, weights, ids, part, places)
    close(triton.run(x, weights, ids, packed_by(triton, *part[:2]), places), expected)
    close(triton.run(x, weights, places[ids], packed_by(triton, *part[:2])), expected)
    if inner % 8 == 0 and hidden % 8 == 0:
        close(grouped.run(x, weights, ids, packed_by(grouped, *part[:2]), places), expected)


@pytest.mark.parametrize("spread", ["even", "one", "few", "none"])
@pytest.mark.parametrize(
    ("pairs", "experts"),
    [
        (1000, 8),
        (4096, 128),
        (4097, 1),
        (5001, 256),
        (16400, 60),
        (65536, 128),
        (131072, 256),
        (300001, 20),
    ],
)
def test_sorted_pairs(device: torch.device, pairs: int, experts: int, spread: str) -> None:
    """By one kernel or two, exactly; with a map that drops the odd ones, and with all experts."""
    torch.manual_seed(pairs)
    most = {"even": experts, "few": min(3, experts), "one": 1, "none": 1}[spread]
    ids = torch.randint(most, (pairs, 1), dtype=torch.int32, device=device) + (spread == "none")
    places = torch.arange(experts + 1, dtype=torch.int32, device=device)
    halved = torch.where(places % 2 == 0, places // 2, -1)
    for mapped, count in ((None, experts + 1), (halved, experts // 2 + 1)):
        place = (ids if mapped is None else mapped[ids]).flatten()
        order, starts = triton._sort(ids, mapped, count)
        expected = torch.cat([(place == expert).nonzero()[:, 0] for expert in range(count)])
        assert starts.tolist() == [int(((place >= 0) & (place < expert)).sum()) for expert in range(count + 1)]
        assert torch.equal(order[: len(expected)], expected.int())


@pytest.mark.skipif(bool(triton_runtime.missing_hopper()), reason=triton_runtime.missing_hopper())
@pytest.mark.parametrize("tokens", [5, 130, 1000, 5000])
@pytest.mark.parametrize("shape", [*SHAPES[:3], (16, 4, 256, 136), (32, 2, 512, 200)], ids=str)
@pytest.mark.parametrize("spread", ["even", "one", "few"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_hopper(
    device: torch.device, shape: tuple[int, int, int, int], tokens: int, spread: str, dtype: torch.dtype
) -> None:
    """Whatever the number of pairs; whole, of one rank of two, and from rows that are apart."""
    experts, k, hidden, inner = shape
    case = Case(tokens, experts, 1 if spread == "one" else k, hidden, inner, spread)
    x, weights, ids, gate_up, down = make(case, dtype, "cuda")
    wide = torch.cat((x, torch.full_like(x, torch.nan)), 1)[:, :hidden]
    found = triton.run(wide, weights, ids, ExpertWeights(gate_up, down), None, None, None, hopper.products)
    close(found, ref.run(x, weights, ids, ExpertWeights(gate_up, down)))
    assert torch.equal(
        found, triton.run(x, weights, ids, ExpertWeights(gate_up, down), None, None, None, hopper.products)
    )
    own = torch.arange(experts, device=device)[1::2]
    places = torch.full((experts,), -1, dtype=torch.int32, device=device)
    places[own] = torch.arange(len(own), dtype=torch.int32, device=device)
    part = ExpertWeights(gate_up[own], down[own])
    found = triton.run(x, weights, ids, part, places, None, None, hopper.products)
    close(found, ref.run(x, weights, ids, part, places))


FORMS = [ExpertForm(act, biased) for act in ACTS for biased in (False, True)][1:]


@pytest.mark.parametrize("tokens", [1, 5, 130, 3000])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(32, 4, 2880, 2880), *SHAPES[2:]], ids=str)
def test_every_form_of_experts(
    device: torch.device, shape: tuple[int, int, int, int], form: ExpertForm, tokens: int
) -> None:
    """All experts of gpt-oss-20b, and others; then those of one rank of two."""
    experts, k, hidden, inner = shape
    case = Case(tokens, experts, k, hidden, inner)
    x, weights, ids, gate_up, down = make(case, torch.bfloat16, "cuda")
    biases = make_biases(case, torch.bfloat16, "cuda") if form.biased else None
    residual = torch.randn_like(x)
    expected = ref.run(x, weights, ids, packed_by(ref, gate_up, down, form.act, biases), None, residual)
    packed = packed_by(triton, gate_up, down, form.act, biases)
    close(triton.run(x, weights, ids, packed, None, residual.clone()), expected)
    if not triton_runtime.missing_hopper():
        close(hopper.run(x, weights, ids, packed, None, residual.clone()), expected)
    if not triton_runtime.missing_hopper() and hidden % 64 == 0:
        found = triton.run(x, weights, ids, packed, None, residual.clone(), None, hopper.products)
        close(found, expected)
    if inner % 8 == 0 and hidden % 8 == 0:
        packed = packed_by(grouped, gate_up, down, form.act, biases)
        close(grouped.run(x, weights, ids, packed, None, residual.clone()), expected)


@pytest.mark.parametrize("spread", ["one", "few"])
@pytest.mark.parametrize("tokens", [3, 40, 700])
def test_uneven_routing(device: torch.device, tokens: int, spread: str) -> None:
    """Every token to one expert, or to three: the others have none."""
    case = Case(tokens, 32, 1 if spread == "one" else 2, 512, 256, spread)
    x, weights, ids, gate_up, down = make(case, torch.bfloat16, "cuda")
    expected = ref.run(x, weights, ids, ExpertWeights(gate_up, down))
    close(triton.run(x, weights, ids, packed_by(triton, gate_up, down)), expected)
    close(grouped.run(x, weights, ids, packed_by(grouped, gate_up, down)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [2, 50, 900])
def test_other_types(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    x, weights, ids, gate_up, down = make(Case(tokens, 16, 4, 264, 136), dtype, "cuda")
    bound = 1e-5 if dtype == torch.float32 else 2e-3
    packed, expected = packed_by(triton, gate_up, down), ref.run(x, weights, ids, ExpertWeights(gate_up, down))
    close(triton.run(x, weights, ids, packed), expected, bound)


@pytest.mark.parametrize("tokens", [3, 64])
def test_weights_beyond_the_reach_of_32_bits(device: torch.device, tokens: int) -> None:
    experts, hidden, inner = 80, 7168, 2048
    gate_up = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device=device).normal_(0, hidden**-0.5)
    down = torch.empty(experts, hidden, inner, dtype=torch.bfloat16, device=device).normal_(0, inner**-0.5)
    assert gate_up.numel() > 2**31
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    ids = torch.tensor([[79, 78]], dtype=torch.int32, device=device).expand(tokens, 2).contiguous()
    weights = torch.rand(tokens, 2, device=device)
    close(
        triton.run(x, weights, ids, ExpertWeights(gate_up, down)),
        ref.run(x, weights, ids - 78, ExpertWeights(gate_up[78:], down[78:])),
    )


@pytest.mark.parametrize("tokens", [1, 4, 16, 300, 1000])
def test_the_same_every_time_and_in_graphs(device: torch.device, tokens: int) -> None:
    """Router, experts and what they read are captured together; replays follow their inputs, bit for bit."""
    x, _, _, gate_up, down = make(Case(tokens, 128, 8, 1024, 256), torch.bfloat16, "cuda")
    logits = torch.randn(tokens, 128, device=device)

    def work() -> Tensor:
        weights, ids = routing.route(logits, None, QWEN3)
        return triton.run(x, weights, ids, ExpertWeights(gate_up, down), None, None)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    for _ in range(20):
        x.normal_()
        logits.normal_()
        expected = work()
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)


def test_uniform_draws_are_new_in_every_replay(device: torch.device) -> None:
    draw = partial(uniform, routing, QWEN3, torch.empty(64, 8, device=device))
    draw()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (_, first), (_, second) = draw(), draw()
    seen = torch.zeros(128, dtype=torch.int64, device=device)
    last = torch.zeros_like(first)
    for _ in range(50):
        graph.replay()
        assert not torch.equal(first, second) and not torch.equal(first, last)
        seen += torch.bincount(first.flatten(), minlength=128)
        last = first.clone()
    assert seen.sum() == 50 * 512 and 120 < int(seen.min()) and int(seen.max()) < 290, "each of 200, deviation 14"
