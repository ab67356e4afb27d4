"""The references of quantized weights against float64 on the same quantized activations."""

from dataclasses import replace

import pytest
import torch

from quire.contracts.scheme import Scheme
from quire.kernels.experts import cpu, ref
from quire.kernels.experts import panels as experts_panels
from quire.kernels.linear import panels, quantized_ref
from quire.kernels.native.library import missing
from quire.kernels.quantize import ref as quantize
from quire.kernels.select import KernelNeeds, choose_linears, select
from quire.quantization.pack.matrix import dequantize, empty, empty_weight

from ...support.quantized_matrices import SCHEMES, make, numbers, product

SHAPES = ((1, 130, 192), (5, 257, 320), (4, 1040, 64))  # (M, N, K); the last has more rows than a piece


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(name: str, shape: tuple[int, int, int]) -> None:
    inputs = make(SCHEMES[name], *shape)
    packed = quantized_ref.pack(inputs.matrix)
    expected = product(inputs)
    actual = quantized_ref.run_float(inputs.x, packed, inputs.bias)
    assert actual.dtype == torch.float32
    bound = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)
    if SCHEMES[name].inputs:  # a product that skips the quantization of activations is seen
        assert (inputs.x.double() @ numbers(inputs.matrix).t() + inputs.bias - expected).abs().max() > 10 * bound
    assert quantized_ref.run(inputs.x.bfloat16(), packed, None).dtype == torch.bfloat16


@pytest.mark.skipif(bool(missing()), reason=missing() or "runs")
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", (*SHAPES, (3, 70, 448), (2, 34, 96), (30, 48, 320)), ids=str)
def test_panels(name: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 on the same quantized activations; shapes are no whole panels, groups or blocks of rows."""
    inputs = make(SCHEMES[name], *shape)
    x, bias = inputs.x, inputs.bias
    packed, expected = panels.pack(inputs.matrix), product(inputs)
    bound = 3e-6 * expected.abs().max().item()
    actual = panels.run(x, packed, bias)
    assert (actual - expected).abs().max() <= bound
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert torch.equal(panels.run(x, packed, bias), actual)
    assert torch.equal(torch.cat([panels.run(row[None], packed, bias) for row in x]), actual), "a row is its own"
    if SCHEMES[name].inputs:  # a product that skips the quantization of activations is seen
        assert (x.double() @ numbers(inputs.matrix).t() + bias - expected).abs().max() > 10 * bound
    residual = torch.randn_like(actual)
    assert (panels.run_add(x, packed, bias, residual) - residual - expected).abs().max() <= 2 * bound
    if shape[1] % 2 == 0:
        gate, up = expected.chunk(2, 1)
        gated = torch.nn.functional.silu(gate) * up
        found = panels.run_gated(x, panels.pack_gated(inputs.matrix), bias)
        assert (found - gated).abs().max() <= 2e-5 * gated.abs().max()
    x[0] = torch.nan
    found = panels.run(x, packed, bias)
    assert found[0].isnan().all() and (shape[0] == 1 or torch.equal(found[1:], actual[1:]))


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_of_a_matrix_are_those_of_the_formula(name: str) -> None:
    matrix = make(SCHEMES[name], 1, 259, 192).matrix
    assert torch.equal(dequantize(matrix), numbers(matrix).float())
    assert torch.equal(dequantize(matrix, 128, 200), numbers(matrix).float()[128:200])
    assert SCHEMES[name].num_bytes(259, 192) == matrix.num_bytes - 4 * (matrix.input_scale is not None)


def test_activations_by_the_rules() -> None:
    x = torch.tensor([[0.0, 0.0], [1e-12, 0.0], [3.0, -6.0], [1e30, 1.0]])
    values, scale = quantize.fp8_tokens(x)
    assert scale.flatten().tolist() == pytest.approx([1e-10 / 448, 1e-10 / 448, 6 / 448, 1e30 / 448])
    assert values.float().tolist() == [[0, 0], [4.5, 0], [224, -448], [448, 0]]
    assert not values.float().isnan().any()
    far = quantize.fp8_static(torch.tensor([1e4, -1e4]), torch.tensor(1.0))
    assert far.float().tolist() == [448, -448], "clamped before the cast, which would make NaN"
    values, scale = quantize.int8_tokens(torch.tensor([[127.0, 2.5, 3.5, -0.5, -126.6]]))
    assert scale.item() == 1 and values.tolist() == [[127, 2, 4, 0, -127]], "halves go to even"
    assert quantize.int8_static(torch.tensor([400.0, -400.0]), torch.tensor(2.0)).tolist() == [127, -128]
    values, scale = quantize.fp8_groups(torch.cat((torch.full((1, 128), 448.0), torch.ones(1, 2)), 1))
    assert scale[0].tolist() == pytest.approx([1.0, 1 / 448]) and values.shape == (1, 130)
    assert values.float()[0, -1] == 448
    for number, power in ((448.0, 1.0), (448.1, 2.0), (224.0, 0.5), (300.0, 1.0)):
        assert quantize.fp8_groups(torch.tensor([[number]]), ue8m0=True)[1].item() == power


@pytest.mark.parametrize("name", ["fp8 blocks", "int8", "w4 groups"])
def test_experts(name: str) -> None:
    """Both products of an expert quantize their activations; experts that no token chose are not read."""
    scheme, hidden, inner, count = SCHEMES[name], 128, 96, 4
    down_of = Scheme(values=scheme.values, block=scheme.block, inputs=scheme.inputs)
    pairs = [(make(scheme, 1, 2 * inner, hidden, seed).matrix, make(down_of, 1, hidden, inner, seed + 9).matrix)
             for seed in range(count)]  # fmt: skip
    x = torch.randn(6, hidden, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 0], [2, 0], [1, 2]], dtype=torch.int32)
    weights = torch.rand(6, 2)
    expected = torch.zeros(6, hidden)
    for t in range(6):
        for weight, expert in zip(weights[t], ids[t].tolist(), strict=True):
            gate, up = quantized_ref.run_float(x[t : t + 1], pairs[expert][0], None).chunk(2, 1)
            inner_row = torch.nn.functional.silu(gate) * up
            expected[t] += weight * quantized_ref.run_float(inner_row, pairs[expert][1], None)[0]
    for kernel in (ref, cpu, *(() if missing() else (experts_panels,))):
        shapes = (empty_weight(one.scheme, one.shape, torch.float32, "meta") for one in pairs[0])
        packed = kernel.empty(count, *shapes, torch.device("cpu"))
        for place, pair in enumerate(pairs):
            kernel.put(packed, place, *pair)
        actual = kernel.run(x, weights, ids, packed)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.wire.values])
def test_experts_take_rows_that_were_quantized_before(name: str, dtype: torch.dtype) -> None:
    """The bits of rows that the experts quantize, also where a rank has no expert of a row; another scale is seen."""
    scheme, hidden, inner, count = SCHEMES[name], 320, 96, 3
    pairs = [(make(scheme, 1, 2 * inner, hidden, seed).matrix, make(scheme, 1, hidden, inner, seed + 9).matrix)
             for seed in range(count)]  # fmt: skip
    x, residual = make(scheme, 6, 1, hidden).x.to(dtype), torch.randn(6, hidden).to(dtype)
    ids = torch.tensor([[0, 2], [2, 1], [0, 1], [1, -1], [3, -1], [3, 2]], dtype=torch.int32)
    expert_map, weights = torch.tensor([2, 0, 1, -1], dtype=torch.int32), torch.rand(6, 2)
    for kernel in (ref, cpu, *(() if missing() else (experts_panels,))):
        shapes = (empty_weight(one.scheme, one.shape, dtype, "meta") for one in pairs[0])
        packed = kernel.empty(count, *shapes, torch.device("cpu"))
        for place, pair in enumerate(pairs):
            kernel.put(packed, place, *pair)
        rows = kernel.quantize_rows(x, scheme.wire)
        assert (len(rows), rows.shape, rows.dtype) == (6, x.shape, dtype)
        assert rows.scales.shape[1] == scheme.wire.num_scales(hidden)
        given = weights, ids, packed, expert_map
        expected = kernel.run(x, *given, residual.clone())
        assert torch.equal(kernel.run(rows, *given, residual.clone()), expected)
        strided = replace(rows, scales=rows.scales.t().contiguous().t())
        assert torch.equal(kernel.run(strided, *given), kernel.run(x, *given))
        wrong = replace(rows, scales=rows.scales * 1.25)
        assert not torch.allclose(kernel.run(wrong, *given, residual.clone()), expected, rtol=1e-2)
        assert kernel.run(rows[:0], weights[:0], ids[:0], packed, expert_map).shape == (0, hidden)


def test_a_kernel_is_chosen_by_the_kind_of_weights() -> None:
    needs = KernelNeeds(device="cpu", dtype="float32")
    schemes = [SCHEMES["fp8 blocks"], SCHEMES["fp8 blocks of a row"], SCHEMES["fp8 blocks ue8m0"], SCHEMES["w4 groups"]]
    choices = choose_linears(needs, schemes, "ref")
    assert [(one.name, one.weights) for one in choices] == [
        ("quantized_ref", ("fp8 block",)), ("quantized_ref", ("fp8 block", "ue8m0")), ("quantized_ref", ("w4",))]
    assert str(choices[0]).startswith("linear of fp8 block weights: quantized_ref (asked for")
    plain = select("linear", needs, probe=lambda need: "")
    assert plain.name == "native" or plain.name == "panels"
    assert "quantized_ref" not in dict(plain.rejected) and "unquantized" not in plain.features


def test_memory_of_a_matrix_that_is_not_filled_yet() -> None:
    for scheme in SCHEMES.values():
        made = empty(scheme, (256, 192), "meta")
        assert made.shape == (256, 192) and made.device.type == "meta"
