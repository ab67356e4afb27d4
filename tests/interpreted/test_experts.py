"""Routing and experts for GPUs in Triton's interpreter, and compiled for sm_90 at the sizes of real models."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.args.experts import Routing
from quire.kernels import triton_runtime
from quire.kernels.activation import ACTS, UNGATED
from quire.kernels.experts import hopper, ref, triton
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.experts.inputs import CASES, Case, make, make_biases, packed_by
from quire.kernels.experts.triton import Tiles
from quire.kernels.experts.weights import ExpertWeights
from quire.kernels.routing import inputs as routing_inputs
from quire.kernels.routing import ref as routing_ref
from quire.kernels.routing import triton as routing
from quire.kernels.routing.inputs import DEEPSEEK_V3, QWEN3, ROUTINGS

from ..support.full import FULL
from ..support.late_residual import LateResidual
from ..support.thinned import thinned

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # relative to the largest value


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(3).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bound = TOLERANCE[expected.dtype] * max([1.0, *expected.abs().flatten().tolist()])
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("plan", "kind"),
    thinned(ROUTINGS, ("distinct", "ties", "negative"), every=2),
    ids=lambda one: one if isinstance(one, str) else f"{one.top_k}-of-{one.num_experts}-{one.num_groups}",
)
def test_routing(plan: Routing, kind: str) -> None:
    logits, bias = routing_inputs.make(plan, 5, kind)
    expected = routing_ref.route(logits, bias, plan)
    expert_scale = torch.rand(plan.num_experts) + 0.5
    scaled = routing.route(logits, bias, plan, None, expert_scale)
    torch.testing.assert_close(scaled[0], expected[0] * expert_scale[expected[1].long()])
    for actual, wanted in zip(routing.route(logits, bias, plan), expected, strict=True):
        assert actual.dtype == wanted.dtype and actual.is_contiguous()
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)
    live = torch.tensor([True, False, True, True, False])
    found, wanted = routing.route(logits, bias, plan, live), routing_ref.route(logits, bias, plan, live)
    assert torch.equal(found[1], wanted[1]) and (found[1] < 0).all(1).tolist() == (~live).tolist()
    wide = torch.cat((logits, logits), 1).bfloat16()[:, plan.num_experts :]
    assert torch.equal(routing.route(wide, bias, plan)[1], routing_ref.route(wide, bias, plan)[1])


@pytest.mark.parametrize("top_k", [1, 3])
def test_routing_by_large_logits(top_k: int) -> None:
    """float32 rounds the sigmoid of all of them to 1."""
    plan = Routing(num_experts=16, top_k=top_k, scoring="sigmoid")
    logits = 25 + 2 * torch.randn(7, 16)
    for actual, wanted in zip(routing.route(logits, None, plan), routing_ref.route(logits, None, plan), strict=True):
        assert torch.equal(actual, wanted)
    assert torch.equal(routing.route(logits, None, plan)[1].long(), logits.topk(top_k).indices)


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
def test_routing_of_no_tokens_and_of_no_numbers() -> None:
    assert routing.route(torch.empty(0, 128), None, QWEN3)[1].shape == (0, 8)
    logits = torch.stack((torch.full((256,), torch.nan), torch.full((256,), -torch.inf)))
    for plan, rows in ((DEEPSEEK_V3, logits), (QWEN3, logits[:, :128])):
        _, ids = routing.route(rows, torch.zeros(256) if plan.correction else None, plan)
        assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < plan.num_experts for row in ids.tolist())


def check(case: Case, dtype: torch.dtype, form: ExpertForm = PLAIN, **cut: Any) -> None:
    """All experts, with and without a residual; then those of one rank, some without a place."""
    x, weights, ids, gate_up, down = make(case, dtype)
    biases = make_biases(case, dtype) if form.biased else None
    if form.act in UNGATED:
        gate_up, biases = gate_up[:, : case.inner], biases and (biases[0][:, : case.inner], biases[1])
    residual, before, local = torch.randn_like(x), x.clone(), max(2, case.experts // 2)
    places = torch.arange(case.experts, dtype=torch.int32) - 1
    places = torch.where(places < local, places, -1)
    for own, mapped, added in ((slice(None), None, residual), (slice(local), places, None)):
        part = gate_up[own], down[own], form.act, biases and (biases[0][own], biases[1][own])
        packed = packed_by(triton, *part)
        expected = ref.run(x, weights, ids, packed_by(ref, *part), mapped, added)
        given = None if added is None else added.clone()
        if cut:
            actual = torch.empty_like(x)
            triton.many(x, weights, ids, packed, mapped, given, actual, **cut)
        else:
            actual = triton.run(x, weights, ids, packed, mapped, given)
        close(actual, expected)
    assert torch.equal(x, before)


# Of the case with the longest rows of `down`, fewer experts do.
SMALLER = [replace(case, experts=3, top_k=3) if case.inner == 264 else case for case in CASES]


@pytest.mark.parametrize("case", SMALLER, ids=str)
def test_experts(case: Case) -> None:
    check(case, torch.float32)


@pytest.mark.parametrize(("case", "dtype"), thinned(CASES[2:4], (torch.float16, torch.bfloat16), every=2), ids=str)
def test_few_tokens_of_two_bytes(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


FORMS = [ExpertForm(act, biased) for act in (*ACTS, *UNGATED) for biased in (False, True)][1:]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_of_experts(form: ExpertForm) -> None:
    """Of few tokens and of many; their tall tiles, too."""
    check(Case(3, 5, 2, 40, 24), torch.float32, form)
    check(Case(9, 4, 2, 48, 40), torch.float32, form)
    check(Case(9, 4, 2, 48, 40), torch.float16, form, cut=(Tiles(16, 32, 32, 4, 3, True), Tiles(16, 32, 16, 4, 2)))


CUTS = {
    "tall": (Tiles(16, 64, 128, 4, 3, True), Tiles(32, 32, 32, 4, 3, True)),
    "mixed": (Tiles(32, 16, 64, 4, 3, True), Tiles(16, 16, 16, 4, 2)),
    "wide": (Tiles(64, 32, 64, 4, 4), Tiles(128, 64, 32, 8, 3)),
}


@pytest.mark.parametrize(
    ("case", "cut"), thinned((Case(9, 5, 2, 48, 40), Case(40, 3, 2, 40, 24, "one")), CUTS, every=2), ids=str
)
def test_every_way_to_cut(case: Case, cut: str) -> None:
    """In float16: the interpreter multiplies matrices of bfloat16 by their bits."""
    check(case, torch.float16, cut=CUTS[cut])


def test_few_and_many_tokens_are_one_operation() -> None:
    x, weights, ids, gate_up, down = make(Case(3, 16, 4, 72, 40), torch.float32)
    found = []
    for function in (triton.few, triton.many):
        found.append(torch.empty_like(x))
        function(x, weights, ids, packed_by(triton, gate_up, down), None, None, found[-1])
    close(found[0], found[1])


def test_rows_without_experts_have_the_residual_alone() -> None:
    """No weights are read for them: those of the only expert that they chose are not numbers."""
    x, weights, ids, gate_up, down = make(Case(6, 4, 2, 72, 40), torch.float32)
    ids[:], residual = torch.tensor([0, 1]), torch.randn_like(x)
    ids[[0, 3]] = -1
    expected = ref.run(x, weights, ids, ExpertWeights(gate_up, down), None, residual)
    gate_up[2:], down[2:] = torch.nan, torch.nan
    packed = packed_by(triton, gate_up, down)
    for function in (triton.few, triton.many):
        y = torch.empty_like(x)
        function(x, weights, ids, packed, None, residual.clone(), y)
        close(y, expected)
        assert torch.equal(y[[0, 3]], residual[[0, 3]])
        function(x, weights, torch.full_like(ids, -1), packed, None, residual.clone(), y)
        assert torch.equal(y, residual)


PLACES = torch.tensor([3, -1, 0, 4, -1, 1, 2, -1], dtype=torch.int32)


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "spread", "mapped"),
    [
        (1, 3, 5, "even", False),
        (341, 3, 5, "even", True),
        (1366, 3, 5, "lacking", False),
        (1365, 3, 33, "even", False),
        (1366, 3, 256, "even", False),
        (4097, 1, 40, "one", False),
        (2060, 2, 5, "even", True),
        (2060, 2, 5, "none", True),
        (2731, 6, 64, "lacking", False),
        (13108, 5, 300, "some", False),
        (513, 8, 1, "even", False),
    ],
    ids=str,
)
def test_sorted_pairs(tokens: int, k: int, experts: int, spread: str, mapped: bool) -> None:
    """By expert and stable: by one kernel or two, a share of one chunk or of more, the last one full or not, whatever
    is dropped and however uneven it is."""
    torch.manual_seed(tokens)
    drawn = {"even": (0, experts), "lacking": (-1, experts), "one": (7, 8), "some": (3, experts - 3), "none": (0, 1)}
    ids = torch.randint(*((0, len(PLACES)) if mapped else drawn[spread]), (tokens, k), dtype=torch.int32)
    if spread == "none":
        ids.fill_(1)
    order, starts = triton._sort(ids, PLACES if mapped else None, experts)
    place = (PLACES[ids] if mapped else ids).flatten()
    assert order.dtype == starts.dtype == torch.int32 and len(order) == tokens * k
    assert starts.tolist() == [int(((place >= 0) & (place < expert)).sum()) for expert in range(experts + 1)]
    assert torch.equal(order[: starts[-1]], place.argsort(stable=True)[(place < 0).sum() :].int())


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("tokens", [3, 9])
def test_the_residual_may_come_late(tokens: int, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for before the last kernel, which is no dependent launch if it waits for two streams."""
    x, weights, ids, gate_up, down = make(Case(tokens, 8, 2, 48, 24), torch.float32)
    packed, residual = packed_by(triton, gate_up, down), torch.randn_like(x)
    expected = ref.run(x, weights, ids, packed, None, residual)
    spy = LateResidual(residual, waits=waits)
    kernels = ("_few_up_kernel", "_few_down_kernel", "_sort_kernel", "_product_kernel", "_sum_kernel")
    spy.watch(triton, kernels, monkeypatch)
    close(triton.run(x, weights, ids, packed, None, spy.late, spy.join), expected)
    *first, joined, last = spy.launched
    assert joined == ("join", waits)
    assert last == ("_few_down_kernel" if tokens == 3 else "_sum_kernel", not waits)
    names = ["_few_up_kernel"] if tokens == 3 else ["_sort_kernel", "_product_kernel", "_product_kernel"]
    assert first == [(name, True) for name in names]


@pytest.mark.parametrize("elsewhere", [0, 1, 300])
@pytest.mark.parametrize(
    "counts",
    [
        (1,),
        (0,),
        (0, 0, 1),
        (128,),
        (129, 0, 127),
        (0, 5, 0, 0, 256, 257, 1, 0),
        (1,) * 40,
        (3, 700, 0) * 20,
        (*range(0, 600, 3), 0),
        (5000, *(0,) * 255),
    ],
    ids=lambda counts: f"{sum(counts)}-to-{len(counts)}",
)
def test_tiles_of_hopper(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], elsewhere: int) -> None:
    """(expert, first pair, pairs left, number of tiles) in the order of experts, and room for all, for both products;
    some pairs have no expert here."""
    starts = torch.tensor((0, *counts)).cumsum(0).int()
    found: list[tuple[Tensor, int]] = []
    monkeypatch.setattr(hopper, "_product", lambda *given: found.append((given[4], given[9])))
    monkeypatch.setattr(hopper, "describe", lambda rows, box: rows)
    pairs, some = sum(counts) + elsewhere, torch.empty(len(counts), 8, 8)
    order = torch.empty(pairs, dtype=torch.int32)
    packed = ExpertWeights(some, some)
    hopper.products(some[0], packed, some[0], some[0], order, starts, torch.empty(1, 1), ())  # type: ignore[arg-type]
    expected = [
        (e, first, end - first)
        for e, (start, end) in enumerate(pairwise(starts.tolist()))
        for first in range(start, end, hopper.ROWS)
    ]
    for tiles, most in found:
        records = tiles.view(most, hopper.WORDS).tolist()
        assert records == [[*record, len(expected)] for record in expected] + [[0, 0, 0, len(expected)]] * (
            most - len(expected)
        )
    assert len(found) == 2


@pytest.mark.parametrize("function", [triton.few, triton.many], ids=["few", "many"])
def test_a_token_depends_on_nothing_but_itself(function: Callable[..., None]) -> None:
    x, weights, ids, gate_up, down = make(Case(6, 4, 2, 32, 16), torch.float32)
    expected, actual = torch.empty_like(x), torch.empty_like(x)
    packed = packed_by(triton, gate_up, down)
    function(x, weights, ids, packed, None, None, expected)
    x[2] = torch.nan
    function(x, weights, ids, packed, None, None, actual)
    assert actual[2].isnan().all()
    others = torch.arange(6) != 2
    assert torch.equal(actual[others], expected[others])


def test_cuts_fit_smaller_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer iterations in flight where a program has less memory, and at least one."""
    stages: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, num_stages, **__: stages.append(num_stages)

    monkeypatch.setattr(triton, "_product_kernel", Kernel())
    for room in (227, 163, 99, 20):
        monkeypatch.setattr(triton, "shared_memory", lambda room=room: room << 10)
        x, weight = torch.empty(8, 64).half(), torch.empty(2, 128, 64).half()
        numbers = torch.empty(9, dtype=torch.int32)
        triton._product(x, weight, None, x.clone(), numbers[:8], numbers, 1, None, "silu", Tiles(128, 128, 64, 8, 4))
    assert stages == [4, 3, 2, 1]


FEW = {"_few_up_kernel", "_few_down_kernel"}
SORTED = {"_sort_kernel", "_product_kernel", "_sum_kernel"}
ALONE = {"_alone_up_kernel", "_alone_down_kernel"}
IN_WORDS = {"_bring_kernel", "hopper._pairs_kernel"}
MANY = {"_count_kernel", "_order_kernel"}  # sort the choices of many tokens


@pytest.mark.parametrize(
    ("part", "kernels"),
    [
        ("decodes", FEW | SORTED | {"_route_kernel"}),
        ("prompts", SORTED | MANY | {"_tiles_kernel", "hopper._grouped_kernel"}),
        ("eight_bits", FEW | SORTED | MANY | {"_quantize_kernel", "_tiles_kernel", "hopper._scaled_kernel"}),
        ("integers", SORTED | MANY | ALONE | IN_WORDS | {"_packed_kernel", "_unpack_kernel"}),
    ],
)
def test_compiles(part: str, kernels: set[str], compiled: Callable[..., set[str]]) -> None:
    found = compiled("compile_experts", part)
    assert found == kernels or (FULL and found > kernels)
