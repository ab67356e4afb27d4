"""The experts: the reference against a loop over tokens, and every implementation against the reference."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from quire.kernels.activation import ACTS
from quire.kernels.activation import ref as activation
from quire.kernels.experts import cpu, grouped, native, panels, ref
from quire.kernels.experts.form import ExpertForm
from quire.kernels.experts.inputs import CASES, Case, make, make_biases, packed_by
from quire.kernels.experts.weights import ExpertWeights
from quire.kernels.linear.native import Packed
from quire.kernels.native.library import missing, missing_amx
from quire.kernels.select import load_kernel
from quire.kernels.supports import SUPPORTS

FLOAT = torch.float32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative to the largest value


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


def short(implementation: ModuleType) -> str:
    return implementation.__name__.rpartition(".")[2]


def cannot_run(implementation: ModuleType, dtype: torch.dtype) -> str:
    """The reason why this machine cannot run an implementation in `dtype`, or ""."""
    if implementation is native:
        return missing_amx() or "bfloat16 only" * (dtype != torch.bfloat16)
    return missing() if implementation is panels else ""


def rank_of(experts: int, ranks: int, rank: int) -> tuple[Tensor, Tensor]:
    """The experts of a rank in an order of its own, and the map to their places."""
    own = torch.arange(experts - 1, -1, -1)[rank::ranks]
    places = torch.full((experts,), -1, dtype=torch.int32)
    places[own] = torch.arange(len(own), dtype=torch.int32)
    return own, places


def test_the_reference_is_the_formula() -> None:
    case = Case(5, 4, 2, 16, 12)
    x, weights, ids, gate_up, down = make(case, torch.float32)
    residual = torch.randn_like(x)
    expected = residual.clone()
    for t in range(case.tokens):
        for weight, expert in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[t]).chunk(2)
            expected[t] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    before = residual.clone()
    close(ref.run(x, weights, ids, packed_by(ref, gate_up, down), None, residual), expected)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("implementation", [ref, cpu, grouped], ids=lambda module: module.__name__.rpartition(".")[2])
def test_rows_without_experts_have_the_residual_alone(implementation: ModuleType) -> None:
    x, weights, ids, gate_up, down = make(Case(6, 4, 2, 16, 12), torch.float32)
    packed, residual = packed_by(implementation, gate_up, down), torch.randn_like(x)
    expected = implementation.run(x, weights, ids, packed, None, residual.clone())
    ids[[0, 3]] = -1
    expected[[0, 3]] = residual[[0, 3]]
    close(implementation.run(x, weights, ids, packed, None, residual.clone()), expected)
    ids[:] = -1
    close(implementation.run(x, weights, ids, packed, None, residual.clone()), residual)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", [cpu, grouped], ids=lambda module: module.__name__.rpartition(".")[2])
def test_matches_the_reference(implementation: ModuleType, case: Case, dtype: torch.dtype) -> None:
    """All experts; those of two ranks, whose results sum to the whole; ids that count a rank's own experts."""
    x, weights, ids, gate_up, down = make(case, dtype)
    residual, before = torch.randn_like(x), x.clone()
    packed = packed_by(implementation, gate_up.clone(), down.clone())
    whole = ref.run(x, weights, ids, ExpertWeights(gate_up, down))
    close(implementation.run(x, weights, ids, packed), whole)
    expected = ref.run(x, weights, ids, ExpertWeights(gate_up, down), None, residual)
    close(implementation.run(x, weights, ids, packed, None, residual.clone()), expected)
    parts = []
    for rank in range(2):
        own, places = rank_of(case.experts, 2, rank)
        packed = packed_by(implementation, gate_up[own].clone(), down[own].clone())
        parts.append(implementation.run(x, weights, ids, packed, places).float())
        close(parts[-1].to(dtype), ref.run(x, weights, ids, ExpertWeights(gate_up[own], down[own]), places))
        close(implementation.run(x, weights, places[ids], packed).float().to(dtype), parts[-1].to(dtype))
    close((parts[0] + parts[1]).to(dtype), whole)
    assert torch.equal(x, before)


@pytest.mark.parametrize("implementation", [ref, cpu, grouped], ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_token_depends_on_nothing_but_itself(implementation: ModuleType) -> None:
    case = Case(20, 4, 2, 32, 16)
    x, weights, ids, gate_up, down = make(case, torch.float32)
    packed = packed_by(implementation, gate_up, down)
    expected = implementation.run(x, weights, ids, packed)
    x[7] = torch.nan
    actual = implementation.run(x, weights, ids, packed)
    others = torch.arange(20) != 7
    assert actual[7].isnan().all()
    close(actual[others], expected[others])


def test_a_rank_without_a_hit_adds_nothing() -> None:
    x, weights, ids, gate_up, down = make(CASES[6], torch.float32)
    for implementation in (ref, cpu, grouped):
        packed = packed_by(implementation, gate_up[1:].clone(), down[1:].clone())
        places = torch.tensor([-1, 0, 1, 2], dtype=torch.int32)
        assert not implementation.run(x, weights, ids, packed, places).any()
        assert torch.equal(implementation.run(x, weights, ids, packed, places, x.clone()), x)


def biased_by_hand(case: Case, act: str, biases: tuple[Tensor, Tensor] | None) -> Tensor:
    """The experts in float64, token by token; the activation by the formulas of `quire.kernels.activation.ref`."""
    x, weights, ids, gate_up, down = (one.double() if one.is_floating_point() else one for one in make(case, FLOAT))
    first, second = biases or (torch.zeros(case.experts, 2 * case.inner), torch.zeros(case.experts, case.hidden))
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(case.tokens):
        for weight, expert in zip(weights[t], ids[t].tolist(), strict=True):
            inner = activation.gated((gate_up[expert] @ x[t] + first[expert].double())[None], act)[0]
            y[t] += weight * (down[expert] @ inner + second[expert].double())
    return y


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_the_reference_has_every_form(act: str, biased: bool) -> None:
    case = Case(5, 4, 2, 16, 12)
    x, weights, ids, gate_up, down = make(case, FLOAT)
    biases = make_biases(case, FLOAT) if biased else None
    packed = packed_by(ref, gate_up, down, act, biases)
    close(ref.run(x, weights, ids, packed), biased_by_hand(case, act, biases).float())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("implementation", [cpu, grouped, panels, native], ids=short)
def test_every_form_matches_the_reference(
    implementation: ModuleType, act: str, biased: bool, dtype: torch.dtype
) -> None:
    """All experts, and those of one rank."""
    if why := cannot_run(implementation, dtype):
        pytest.skip(why)
    for case in (CASES[2], CASES[5], CASES[7]):
        x, weights, ids, gate_up, down = make(case, dtype)
        biases = make_biases(case, dtype) if biased else None
        packed, residual = packed_by(implementation, gate_up, down, act, biases), torch.randn_like(x)
        expected = ref.run(x, weights, ids, packed_by(ref, gate_up, down, act, biases), None, residual)
        close(implementation.run(x, weights, ids, packed, None, residual.clone()), expected)
        own, places = rank_of(case.experts, 2, 1)
        part = biases and (biases[0][own], biases[1][own])
        packed = packed_by(implementation, gate_up[own], down[own], act, part)
        expected = ref.run(x, weights, ids, packed_by(ref, gate_up[own], down[own], act, part), places)
        close(implementation.run(x, weights, ids, packed, places), expected)


@pytest.mark.parametrize("implementation", [ref, cpu, grouped, panels, native], ids=short)
def test_biases_and_form_must_agree(implementation: ModuleType) -> None:
    if why := cannot_run(implementation, torch.bfloat16):
        pytest.skip(why)
    case = CASES[2]
    *_, gate_up, down = make(case, torch.bfloat16)
    biases = tuple(one[0] for one in make_biases(case, torch.bfloat16))
    for form, given in ((ExpertForm(), biases), (ExpertForm(biased=True), None)):
        packed = implementation.empty(1, gate_up[0], down[0], gate_up.device, form)
        with pytest.raises(ValueError, match="ExpertForm" if given else "the form is biased"):
            implementation.put(packed, 0, gate_up[0].clone(), down[0].clone(), given)
    with pytest.raises(ValueError, match="activation 'relu' does not exist"):
        ExpertForm("relu")


@pytest.mark.parametrize("name", SUPPORTS["experts"])
def test_what_is_written_in_place_is_packed(name: str) -> None:
    """By each kernel with the feature; no other one has a destination."""
    kernel = load_kernel("experts", name)
    assert hasattr(kernel, "destination") == ("in place" in SUPPORTS["experts"][name].features)
    if hasattr(kernel, "destination"):
        *_, gate_up, down = make(CASES[5], torch.float32)
        written = kernel.empty(len(gate_up), gate_up[0].to("meta"), down[0].to("meta"), torch.device("cpu"))
        for room, given in zip(kernel.destination(written), (gate_up, down), strict=True):
            assert room.is_contiguous() and room.shape == given.shape
            room.copy_(given)
        assert str(written) == str(packed_by(kernel, gate_up, down))


@pytest.mark.skipif(bool(missing()), reason=missing() or "runs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_panels_match_the_reference(case: Case, dtype: torch.dtype) -> None:
    """Also weights that stay bfloat16 in float32 arithmetic."""
    x, weights, ids, gate_up, down = make(case, dtype)
    residual = torch.randn_like(x)
    expected = ref.run(x, weights, ids, ExpertWeights(gate_up, down), None, residual)
    close(panels.run(x, weights, ids, packed_by(panels, gate_up, down), None, residual), expected)
    gate_up, down = gate_up.bfloat16(), down.bfloat16()
    expected = ref.run(x, weights, ids, ExpertWeights(gate_up.to(dtype), down.to(dtype)), None, residual)
    close(panels.run(x, weights, ids, packed_by(panels, gate_up, down), None, residual), expected)


@pytest.mark.skipif(bool(missing_amx()), reason=missing_amx() or "runs")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_native_linears_match_the_reference(case: Case) -> None:
    x, weights, ids, gate_up, down = make(case, torch.bfloat16)
    residual = torch.randn_like(x)
    expected = ref.run(x, weights, ids, ExpertWeights(gate_up, down), None, residual)
    close(native.run(x, weights, ids, packed_by(native, gate_up, down), None, residual), expected)


@pytest.mark.skipif(bool(missing_amx()), reason=missing_amx() or "runs")
def test_weights_are_packed_for_the_native_linears_and_lie_together() -> None:
    *_, gate_up, down = make(CASES[0], torch.bfloat16)
    packed = packed_by(native, gate_up, down)
    first, second = packed[0][0], packed[1][0]
    assert isinstance(first, Packed) and isinstance(second, Packed)
    assert second.data.data_ptr() - first.data.data_ptr() == first.data.nbytes
