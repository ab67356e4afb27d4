"""The references of quantized weights against float64 on the same quantized activations."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from quire.contracts.scheme import Scheme
from quire.kernels.experts import cpu, ref
from quire.kernels.experts import panels as experts_panels
from quire.kernels.linear import panels, quantized_ref
from quire.kernels.native.library import loaded, missing
from quire.kernels.native.recording import Buffers, KernelRecording
from quire.kernels.pack.matrix import QuantizedMatrix, dequantize, empty, empty_weight
from quire.kernels.quantize import ref as quantize
from quire.kernels.select import KernelNeeds, choose_linears, select

from ...support.quantized_matrices import SCHEMES, Inputs, make, numbers, product

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


needs_library = pytest.mark.skipif(bool(missing()), reason=missing() or "runs")


@contextmanager
def instructions(way: str) -> Iterator[None]:
    """Act as if the CPU had no int8 unit ("pairs"), or no unit for pairs of bfloat16 either ("floats")."""
    with pytest.MonkeyPatch.context() as patch:
        if way != "all":
            patch.setattr("quire.kernels.pack.panel_sizes.MOST_QUADS", 0)
        if way == "floats":
            patch.setattr(panels.Packed, "pairs", lambda self, dtype: False)
        yield


@needs_library
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", (*SHAPES, (3, 70, 448), (2, 34, 96), (30, 48, 320), (13, 33, 644)), ids=str)
def test_panels(name: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 on the same quantized activations; shapes are no whole panels, groups or blocks of rows."""
    if SCHEMES[name].block[1] and shape[2] % SCHEMES[name].block[1] and SCHEMES[name].values != "e4m3":
        pytest.skip("groups do not divide the inputs")
    inputs = make(SCHEMES[name], *shape)
    weight = numbers(inputs.matrix)
    for dtype, way in itertools.product((torch.float32, torch.bfloat16), ("all", "pairs", "floats")):
        with instructions(way):
            one = replace(inputs, x=inputs.x.clone().to(dtype).float(), bias=inputs.bias.to(dtype).float())
            check_panels(one, product(one, weight), weight, dtype, monkeypatch)


def check_panels(
    inputs: Inputs, expected: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but `rows`; inputs are numbers that `dtype` holds."""
    x, bias, matrix = inputs.x.to(dtype), inputs.bias.to(dtype), inputs.matrix
    packed, coarse = panels.pack(matrix), 0.0 if dtype == torch.float32 else 2**-8
    bound = 3e-6 * expected.abs().max().item()
    actual = panels.run_float(x, packed, bias)
    assert (actual - expected).abs().max() <= bound
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert torch.equal(panels.run(x, packed, bias), actual.to(dtype))
    assert torch.equal(torch.cat([panels.run_float(row[None], packed, bias) for row in x]), actual), "a row is its own"
    assert torch.equal(panels.run_float(x[:3], packed, bias), actual[:3])
    if matrix.scheme.inputs:  # a product that skips the quantization of activations is seen
        assert (x.double() @ weight.t() + bias - expected).abs().max() > 10 * bound
    residual = torch.randn_like(actual).to(dtype)
    added = expected + residual
    assert (panels.run_add(x, packed, bias, residual) - added).abs().max() <= 2 * bound + coarse * added.abs().max()
    if packed.cols % 2 == 0:
        gate, up = expected.chunk(2, 1)
        gated = torch.nn.functional.silu(gate) * up
        found = panels.run_gated(x, panels.pack_gated(matrix), bias)
        ungated = panels.run(x, panels.pack_gated(matrix), bias)
        assert (ungated - expected).abs().max() <= (2e-5 + 2 * coarse) * expected.abs().max()
        assert (found - gated).abs().max() <= (2e-5 + coarse) * gated.abs().max()
    x[0] = torch.nan
    found = panels.run_float(x, packed, bias)
    assert found[0].isnan().all() and torch.equal(found[1:], actual[1:])
    x[0] = 0
    x[0, -1] = torch.inf
    found = panels.run_float(x, packed, bias)
    assert torch.equal(found[1:], actual[1:])
    if matrix.scheme.inputs != "tensor":  # a stored scale clamps it
        assert not found[0].isfinite().any()


@pytest.mark.skipif(bool(missing()) or not loaded().quire_quads(), reason="this CPU does not multiply int8")
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 12, 25])
@pytest.mark.parametrize("inputs", [4, 130, 1027])
def test_sums_of_int8_are_exact(rows: int, inputs: int) -> None:
    """Integers to the last one, also where every product is the largest there is."""
    random = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (70, inputs), generator=random, dtype=torch.int8)
    values[:3] = torch.tensor([[-128], [127], [0]], dtype=torch.int8)
    x = torch.randint(-128, 128, (rows, inputs), generator=random)
    x[0] = -128
    matrix = QuantizedMatrix(SCHEMES["int8 static"], values, torch.ones(70, 1), input_scale=torch.tensor(1.0))
    packed = panels.pack(matrix)
    assert packed.quads
    assert torch.equal(panels.run(x.float(), packed, None), (x @ values.long().t()).float())


@needs_library
@pytest.mark.parametrize("name", ["int8", "int8 static", "fp8 blocks", "w4 groups", "w8 groups", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_recorded_product_quantizes_new_activations(name: str, rows: int) -> None:
    inputs = make(SCHEMES[name], 2 * rows, 70, 320)
    x = inputs.x.bfloat16()
    packed, given = panels.pack(inputs.matrix), x[:rows].clone()
    recording = KernelRecording(8, Buffers())
    out = recording.record(lambda: panels.run(given, packed, None))
    assert not recording.obstacle and len(recording) == 2
    for some in (x[rows:], x[:rows]):
        given.copy_(some)
        recording.replay()
        assert torch.equal(out, panels.run(some, packed, None))


@needs_library
@pytest.mark.parametrize(
    ("name", "rows", "units", "text"),
    [
        (
            "int8",
            1,
            {"quads": True},
            "INT8 per channel stays packed, multiplied in integers; activations quantized per token",
        ),
        (
            "fp8 blocks",
            1,
            {"unit": True},
            "FP8 in blocks of 128 x 128 stays packed, widened in registers to float32; "
            "activations quantized per token and 128 channels",
        ),
        (
            "w4 groups",
            8,
            {"unit": True},
            "4-bit in groups of 32 stays packed, widened in the cache, once for many rows, to "
            "bfloat16; activations are not quantized",
        ),
        (
            "int8 static",
            8,
            {"quads": False, "unit": False},
            "INT8 per channel stays packed, widened in the cache, once for "
            "many rows, to float32; activations quantized by a stored scale",
        ),
    ],
)
def test_the_way_of_a_product(name: str, rows: int, units: dict[str, bool], text: str) -> None:
    inputs = make(SCHEMES[name], rows, 64, 128)
    packed = replace(panels.pack(inputs.matrix), **units)
    end = ", by quire_linear_rows before; their scales multiply the sums" * bool(SCHEMES[name].inputs)
    assert panels.way(inputs.x.bfloat16(), packed) == f"weight of {text}{end}"
    assert panels.way(inputs.x, panels.pack(torch.ones(8, 8))) == ""


@pytest.mark.skipif(bool(missing()) or not loaded().quire_quads(), reason="this CPU does not multiply int8")
def test_more_inputs_than_an_int32_holds_are_not_added_in_one() -> None:
    wide = [panels.empty(1, empty(SCHEMES["int8"], (1, 1 << 17 - less), "meta"), False)[0] for less in (0, 1)]
    assert [one.quads for one in wide] == [False, True]


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_of_a_matrix_are_those_of_the_formula(name: str) -> None:
    matrix = make(SCHEMES[name], 1, 259, 192).matrix
    assert torch.equal(dequantize(matrix), numbers(matrix).float())
    assert torch.equal(dequantize(matrix, 128, 200), numbers(matrix).float()[128:200])
    held = sum(tensor.nbytes for what, tensor in matrix.tensors.items() if what != "input_scale")
    assert SCHEMES[name].num_bytes(259, 192) == held


def test_every_code_of_mxfp4_with_every_scale() -> None:
    """All 16 numbers and all powers of two that float32 holds, also those below its normal numbers."""
    values = torch.arange(16, dtype=torch.uint8)
    values = (values[0::2] | values[1::2] << 4).repeat(255, 2)
    scale = torch.arange(255, dtype=torch.uint8)[:, None]
    found = dequantize(QuantizedMatrix(SCHEMES["mxfp4"], values, scale).check()).double()
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    truth = torch.cat((sizes, -sizes)).repeat(2) * 2.0 ** (torch.arange(255)[:, None].double() - 127)
    held = truth.abs() <= torch.finfo(torch.float32).max
    assert torch.equal(found[held], truth[held]) and found[~held].isinf().all() and int((~held).sum()) == 2 * (4 + 8)
    assert torch.equal(found[:253], found[:253].bfloat16().double()), "bfloat16 holds them, too"


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


@pytest.mark.parametrize("name", ["fp8 blocks", "int8", "w4 groups", "mxfp4"])
def test_experts(name: str) -> None:
    """Both products of an expert quantize their activations; experts that no token chose are not read."""
    scheme, hidden, inner, count = SCHEMES[name], 128, 96, 4
    down_of = Scheme(values=scheme.values, block=scheme.block, inputs=scheme.inputs)
    pairs = [
        (make(scheme, 1, 2 * inner, hidden, seed).matrix, make(down_of, 1, hidden, inner, seed + 9).matrix)
        for seed in range(count)
    ]
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
    pairs = [
        (make(scheme, 1, 2 * inner, hidden, seed).matrix, make(scheme, 1, hidden, inner, seed + 9).matrix)
        for seed in range(count)
    ]
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
    schemes = [
        SCHEMES[name] for name in ("fp8 blocks", "fp8 blocks of a row", "fp8 blocks ue8m0", "w4 groups", "mxfp4")
    ]
    choices = choose_linears(needs, schemes, "ref")
    assert [(one.name, one.weights) for one in choices] == [
        ("quantized_ref", ("fp8 block",)),
        ("quantized_ref", ("fp8 block", "ue8m0")),
        ("quantized_ref", ("w4",)),
        ("quantized_ref", ("mxfp4",)),
    ]
    assert str(choices[0]).startswith("linear of fp8 block weights: quantized_ref (asked for")
    plain = select("linear", needs, probe=lambda need: "")
    assert plain.name == "native" or plain.name == "panels"
    assert "quantized_ref" not in dict(plain.rejected) and "unquantized" not in plain.features


def test_kernels_for_hopper_say_why_they_run_no_nvfp4() -> None:
    """A choice for another device does not mention them."""
    for op, device, told in (("linear", "cuda", True), ("experts", "cuda", True), ("linear", "cpu", False)):
        needs = KernelNeeds(device=device, dtype="bfloat16", scheme=SCHEMES["nvfp4"])
        choice = select(op, needs, probe=lambda need: "")
        assert choice.name == ("weight_only" if told else "panels")
        reason = "runs no nvfp4 weights: its words have scales for 32 inputs or more, not for 16"
        assert dict(choice.rejected).get("weight_only_hopper", "") == reason * told


def test_memory_of_a_matrix_that_is_not_filled_yet() -> None:
    for scheme in SCHEMES.values():
        made = empty(scheme, (256, 192), "meta")
        assert made.shape == (256, 192) and made.device.type == "meta"
