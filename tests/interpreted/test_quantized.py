"""Kernels of quantized linear layers and experts for GPUs, in Triton's interpreter.

The interpreter computes bfloat16 products wrongly, so activations are float16. It loses the carry of a number that
rounds up to the next power of two in e4m3, which becomes half as large, and it rounds halves away from zero.
tests/gpu/test_quantized.py demands equality.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from quire.contracts.scheme import GROUP, Scheme, Wire
from quire.kernels import triton_runtime
from quire.kernels.activation import ACTS
from quire.kernels.experts import scaled as experts
from quire.kernels.experts import weight_only as weight_only_experts
from quire.kernels.experts import weight_only_hopper as weight_only_hopper_experts
from quire.kernels.experts.form import ExpertForm
from quire.kernels.experts.triton import _sort
from quire.kernels.linear import scaled, scaled_few, weight_only, weight_only_hopper
from quire.kernels.pack.matrix import QuantizedMatrix, dequantize
from quire.kernels.quantize import ref
from quire.kernels.quantize import triton as quantize_triton
from quire.kernels.quantize.triton import quantize
from quire.kernels.weight_only import pairs_alone, pairs_in_tiles, pairs_in_words, words

from ..support.late_residual import LateResidual
from ..support.quantized_cases import (
    ACTIVATED,
    CALLS,
    ODD,
    SCALED,
    WEIGHT_ONLY,
    WORDS,
    Call,
    compare,
    compare_experts,
    exact_values,
    make_matrix,
    stands_for,
)
from ..support.thinned import thinned

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

CPU = torch.device("cpu")
GUARD = 1 << 16  # bytes


@pytest.fixture(autouse=True)
def seven_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels ask for the number of a GPU's multiprocessors."""
    monkeypatch.setattr(scaled_few, "multiprocessors", lambda: 7)
    monkeypatch.setattr(pairs_in_tiles, "shared_memory", lambda: 227 << 10)
    torch.manual_seed(0)


@pytest.mark.parametrize(("kind", "call"), thinned(SCALED, (*CALLS, *ODD, *ACTIVATED)), ids=str)
def test_products_of_eight_bits(kind: str, call: Call) -> None:
    compare(scaled, SCALED[kind], call, torch.float16, CPU, 4e-3)


@pytest.mark.parametrize(
    ("kind", "call"), thinned(WEIGHT_ONLY, (call for call in (*CALLS, *ACTIVATED) if not call.norm)), ids=str
)
def test_products_of_integer_weights(kind: str, call: Call) -> None:
    compare(weight_only, WEIGHT_ONLY[kind], call, torch.float16, CPU, 4e-3)


MANY = (Call(257, 200, 384, bias=True, residual=True), Call(260, 72, 384, gated=True))


@pytest.mark.parametrize(("kind", "call"), thinned(WORDS, MANY, every=2), ids=str)
def test_many_rows_times_integer_weights_in_words(kind: str, call: Call) -> None:
    """The weight is unpacked; fewer rows need a GPU."""
    compare(weight_only_hopper, WEIGHT_ONLY[kind], call, torch.float16, CPU, 4e-3)


# 144 and 208 inputs are no multiple of a tile's 32; of many rows the weight is unpacked; K is divided into parts.
NVFP4 = (
    Call(1, 192, 208, bias=True, residual=True), Call(3, 256, 144, gated=True, bias=True), Call(1, 128, 640),
    Call(9, 100, 256), Call(40, 128, 256, gated=True, act="swiglu_oai"), Call(70, 192, 128),
    Call(257, 200, 144, bias=True), Call(260, 128, 384, gated=True),
)  # fmt: skip


@pytest.mark.parametrize("call", NVFP4, ids=str)
def test_products_of_nvfp4(call: Call) -> None:
    compare(weight_only, WEIGHT_ONLY["nvfp4"], call, torch.float16, CPU, 4e-3)


def test_every_number_of_nvfp4_with_every_scale() -> None:
    """Products of E2M1, E4M3 and factors of rows: rounded to float32 once by the truth, twice by the kernel."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(127)
    scale = torch.arange(127, dtype=torch.uint8).view(1, 127).expand(3, 127).contiguous().view(torch.float8_e4m3fn)
    values = (codes[0::2] | codes[1::2] << 4).expand(3, -1).contiguous()
    factor = torch.tensor([[1.0], [0.7], [3e-5]])
    matrix = QuantizedMatrix(WEIGHT_ONLY["nvfp4"], values, scale, factor=factor).check()
    packed = weight_only.pack(matrix)
    assert not isinstance(packed, QuantizedMatrix)
    found, truth = packed.unpack(torch.float32), dequantize(matrix)
    assert torch.equal(found[0], truth[0])
    torch.testing.assert_close(found, truth, rtol=2.0**-22, atol=0)
    for kind in (torch.bfloat16, torch.float16):  # a kernel multiplies by these before the product
        assert torch.equal(truth[0].to(kind).float(), truth[0])


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 144, 80), (5, 256, 48), (70, 128, 112)])
@pytest.mark.parametrize("form", [ExpertForm(), ExpertForm("swiglu_oai", True)], ids=str)
def test_experts_of_nvfp4(form: ExpertForm, tokens: int, hidden: int, inner: int) -> None:
    """Sizes are no multiple of a tile's 32 inputs; each expert has factors of its own."""
    given = WEIGHT_ONLY["nvfp4"], tokens, 3, 2, hidden, inner, torch.float16, CPU, 4e-3
    compare_experts(*given, residual=tokens == 5, away=(1,), kernel=weight_only_experts, form=form)


@pytest.mark.parametrize("kind", ["w4 32 order", "w4 channel", "w8 channel symmetric"])
def test_words_of_inputs_that_are_no_multiple_of_a_step(kind: str) -> None:
    compare(weight_only_hopper, WEIGHT_ONLY[kind], Call(257, 40, 160), torch.float16, CPU, 4e-3)


@pytest.mark.parametrize(
    ("kernel", "kind", "texts"),
    [
        (
            scaled,
            next(iter(SCALED)),
            {
                1: "widened in registers; activations quantized per .*, in the kernel of the product",
                8: "multiplied in 8 bits by Triton's .*, by a kernel before",
                300: "multiplied in 8 bits by cuBLASLt; activations .*, by a kernel before",
            },
        ),
        (
            weight_only,
            "w4 32 order",
            {
                1: "stays packed, widened in registers; activations are not quantized",
                300: "dequantized to float16 by a kernel before; .*; activations are not quantized",
            },
        ),
        (weight_only_hopper, "w4 32 order", {1: "stays packed, widened in registers", 300: "dequantized to float16"}),
    ],
)
def test_the_way_of_a_product(kernel: ModuleType, kind: str, texts: dict[int, str]) -> None:
    """Text for a trace, by the number of rows."""
    packed = kernel.pack(make_matrix({**SCALED, **WEIGHT_ONLY}[kind], 128, 256, CPU))
    for rows, text in texts.items():
        assert re.search(f"^weight of (FP8|4-bit) in .* {text}", kernel.way(torch.empty(rows, 256).half(), packed))


@pytest.mark.parametrize(
    ("module", "kernels"),
    [
        ("compile_linear", {"hopper._few_kernel", "hopper._some_kernel", "_product_kernel", "_unpack_kernel"}),
        ("compile_scaled", {"hopper._some_kernel", "_quantize_kernel"}),
        ("compile_dense", {"hopper._some_kernel"}),
    ],
)
def test_products_compile_for_hopper(module: str, kernels: set[str], compiled: Callable[[str], set[str]]) -> None:
    assert compiled(module) == kernels


@pytest.mark.parametrize("kind", SCALED)
def test_activations_are_quantized_by_the_rule(kind: str) -> None:
    matrix = make_matrix(SCALED[kind], 64, 384, CPU)
    x = torch.randn(5, 384).half()
    x[1] = 0
    x[2, ::7] *= 100
    ours, exact = stands_for(x, matrix), exact_values(x, matrix)
    next_code = (ours - exact).abs() <= exact.abs() / 8
    lost_carry = (ours * 2 - exact).abs() <= 1e-6 * exact.abs()
    assert (next_code | lost_carry if "fp8" in kind else ours == exact).all()
    assert (ours == exact).double().mean() > 0.9 and (ours[1] == 0).all()


@pytest.mark.parametrize("wire", [Wire("e4m3", GROUP), Wire("e4m3", GROUP, True), Wire("e4m3"), Wire("int8")], ids=str)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_a_number_that_is_none_makes_none_of_all_that_share_its_scale(wire: Wire) -> None:
    """As in the reference; other rows and groups are as if nothing had been there."""
    x = torch.randn(5, 384).half()
    x[1, 5], x[2, 200], x[3, 383] = torch.nan, torch.inf, -torch.inf
    ours, exact, without = (
        of.quantize_rows(given, wire).float()
        for of, given in ((quantize_triton, x), (ref, x), (quantize_triton, x.nan_to_num(0, 0, 0)))
    )
    assert torch.equal(quantize_triton.quantize_rows(x, wire).scales.isnan(), ref.quantize_rows(x, wire).scales.isnan())
    assert torch.equal(ours.isfinite(), exact.isfinite()) and not exact.isfinite().all(1)[1:4].any()
    assert torch.equal(ours[exact.isfinite()], without[exact.isfinite()])


def test_normed_rows_are_rounded_before_they_are_quantized() -> None:
    """The quantized rows are those of the norm's own result in 16 bits."""
    x, weight = torch.randn(3, 256).half(), torch.rand(256).half()
    normed = (torch.nn.functional.rms_norm(x.float(), (256,), eps=1e-6) * weight.float()).half()
    q, scales = quantize(x, 0, torch.int8, norm=weight, eps=1e-6)
    theirs, their_scales = quantize(normed, 0, torch.int8)
    assert torch.equal(q[:3], theirs[:3]) and torch.equal(scales[:, :3], their_scales[:, :3])


@pytest.mark.parametrize(("kind", "tokens"), thinned(SCALED, (1, 2, 9)))
def test_experts_of_eight_bits(kind: str, tokens: int) -> None:
    compare_experts(SCALED[kind], tokens, 4, 2, 256, 128, torch.float16, CPU, 2e-2, residual=tokens == 2)


FORMS = [ExpertForm(act, biased) for act in ACTS for biased in (False, True)][1:]


@pytest.mark.parametrize(("form", "kind"), thinned(FORMS, ("fp8 block", "int8 token", "int8 tensor")), ids=str)
def test_every_form_of_experts_of_eight_bits(form: ExpertForm, kind: str) -> None:
    """Of few tokens and of many, and of sizes that are padded."""
    inner = 128 if kind == "fp8 block" else 72
    for tokens in (1, 9):
        compare_experts(SCALED[kind], tokens, 4, 2, 200, inner, torch.float16, CPU, 2e-2, away=(1,), form=form)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_of_experts_of_integer_weights(form: ExpertForm) -> None:
    for kind, hidden, inner in (("w4 channel", 200, 72), ("w8 128", 256, 128)):
        given = 5, 3, 2, hidden, inner, torch.float16, CPU, 4e-3
        compare_experts(WEIGHT_ONLY[kind], *given, away=(1,), kernel=weight_only_experts, form=form)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Behind each tensor that the experts allocate lie 64 KiB, which no kernel may write."""
    made = list[torch.Tensor]()

    def allocate(value: int, *size: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        shape = tuple(size[0]) if isinstance(size[0], tuple | torch.Size) else size
        room = torch.full((math.prod(shape) * dtype.itemsize + GUARD,), 0x5A, dtype=torch.uint8)
        made.append(room[-GUARD:])
        return room[:-GUARD].fill_(value).view(dtype).view(shape)

    monkeypatch.setattr(torch, "empty", partial(allocate, 0x5A))
    monkeypatch.setattr(torch, "zeros", partial(allocate, 0))
    yield
    assert made and all(bool((room == 0x5A).all()) for room in made), "a kernel wrote behind a tensor"


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("kind", "tokens", "hidden", "inner"),
    thinned(
        ("fp8 block", "fp8 block of one row", "fp8 channel token", "int8 tensor"),
        (1, 9),
        ((256, 72), (200, 200)),
    ),
)
def test_experts_whose_sizes_are_no_multiples_of_128(kind: str, tokens: int, hidden: int, inner: int) -> None:
    """No column is lost, and nothing is written behind a buffer. A block has no rows of gate and up."""
    inner = 128 if kind == "fp8 block" else inner
    compare_experts(SCALED[kind], tokens, 4, 2, hidden, inner, torch.float16, CPU, 2e-2, residual=tokens == 9)


@pytest.mark.parametrize(
    ("kind", "tokens", "hidden"),
    thinned((kind for kind, scheme in SCALED.items() if scheme.wire.values), ((1, 256), (9, 200)), every=2),
)
def test_experts_take_rows_that_were_quantized_before(
    kind: str, tokens: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of rows that the experts quantize, with scales in either order."""
    scheme, (count, top_k, inner) = SCALED[kind], (3, 2, 128)
    pairs = [
        (make_matrix(scheme, 2 * inner, hidden, CPU), make_matrix(scheme, hidden, inner, CPU)) for _ in range(count)
    ]
    packed = experts.empty(count, *pairs[0], CPU)
    for place, pair in enumerate(pairs):
        experts.put(packed, place, *pair)
    x, residual = torch.randn(tokens, hidden).half(), torch.randn(tokens, hidden).half()
    ids = torch.stack([torch.randperm(count + 1)[:top_k] for _ in range(tokens)]).int()
    given = torch.rand(tokens, top_k), ids, packed, torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    monkeypatch.setattr(experts, "MOST_FEW", 0)
    expected = experts.run(x, *given, residual.clone())
    rows = experts.quantize_rows(x, scheme.wire)
    assert (len(rows), rows.shape, rows.dtype) == (tokens, x.shape, x.dtype)
    for scales in (rows.scales, rows.scales.contiguous()):
        assert torch.equal(experts.run(replace(rows, scales=scales), *given, residual.clone()), expected)
    assert not torch.equal(experts.run(replace(rows, scales=2 * rows.scales), *given, residual.clone()), expected)
    assert experts.run(rows[:0], given[0][:0], ids[:0], *given[2:]).shape == (0, hidden)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("kind", "tokens", "hidden", "inner"),
    thinned(WEIGHT_ONLY, ((1, 256, 128), (9, 384, 256), (70, 256, 128))),
)
def test_experts_of_integer_weights(kind: str, tokens: int, hidden: int, inner: int) -> None:
    """With the three tilings: scaled after the product, and before it."""
    compare_experts(
        WEIGHT_ONLY[kind],
        tokens,
        3,
        2,
        hidden,
        inner,
        torch.float16,
        CPU,
        4e-3,
        residual=tokens == 9,
        away=(1,) if tokens == 9 else (),
        kernel=weight_only_experts,
    )


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("kind", "hidden", "inner"),
    [
        ("w4 channel", 200, 72),
        ("w8 channel symmetric", 72, 200),
        ("w4 32 order", 224, 96),
        ("w4 64 symmetric", 192, 64),
    ],
)
def test_experts_of_integer_weights_of_any_size(kind: str, hidden: int, inner: int) -> None:
    compare_experts(WEIGHT_ONLY[kind], 5, 3, 2, hidden, inner, torch.float16, CPU, 4e-3, kernel=weight_only_experts)


@pytest.mark.usefixtures("guarded")
def test_experts_whose_matrices_have_other_widths() -> None:
    first, second = Scheme(values="w4", block=(1, 64)), Scheme(values="w8", block=(1, 32), zeros=True)
    given = 5, 3, 2, 192, 96, torch.float16, CPU, 4e-3
    compare_experts(first, *given, kernel=weight_only_experts, second=second)


def test_experts_of_mxfp4_in_words_hold_their_numbers() -> None:
    """Sizes are whole and odd blocks of 64 outputs, of which many odd ones get another block."""
    scheme = WEIGHT_ONLY["mxfp4"]
    for hidden, inner in ((160, 96), (1184, 32)):
        pairs = [(make_matrix(scheme, 2 * inner, hidden, CPU), make_matrix(scheme, hidden, inner, CPU)) for _ in "abc"]
        packed = weight_only_hopper_experts.empty(3, *pairs[0], CPU)
        for place in (2, 0, 1):
            weight_only_hopper_experts.put(packed, place, *pairs[place])
        assert packed[1].words.shape[1] == {160: 12, 1184: 80}[hidden]
        for stack, place in product(packed[:2], range(3)):
            matrix = pairs[place][stack is packed[1]]
            given = stack.words[place], stack.scales[place], None, matrix.shape, torch.float32
            found = words.unpack(*given, bits=4, group=32, gated=stack.gated)
            assert torch.equal(found, dequantize(matrix))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


ALONE = (
    (1, 4, 160, 96, (), ExpertForm()), (2, 3, 224, 32, (0, 2), FORMS[0]), (3, 2, 104, 40, (), FORMS[1]),
    (2, 2, 32, 544, (1,), FORMS[2]), (1, 3, 1184, 64, (3,), FORMS[3]), (1, 4, 32, 544, (), FORMS[4]),
)  # fmt: skip


@pytest.mark.parametrize(("tokens", "top_k", "hidden", "inner", "away", "form"), ALONE, ids=str)
@pytest.mark.filterwarnings("ignore:overflow")
def test_each_pair_of_few_tokens_by_itself(
    poisoned: None,
    tokens: int,
    top_k: int,
    hidden: int,
    inner: int,
    away: tuple[int, ...],
    form: ExpertForm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inputs are no multiple of a step, outputs none of a unit or a block; a warp has a step, or several, or none.

    Fewer words are read ahead than on a GPU, so that few steps are more than those.
    """
    monkeypatch.setattr(pairs_alone, "READ_AHEAD", 16)
    compare_experts(
        WEIGHT_ONLY["mxfp4"],
        tokens,
        4,
        top_k,
        hidden,
        inner,
        torch.float16,
        CPU,
        4e-3,
        residual=not away,
        away=away,
        kernel=weight_only_hopper_experts,
        form=form,
    )


def mxfp4_experts(hidden: int, inner: int) -> weight_only_hopper_experts.Packed:
    """Three experts."""
    pairs = [
        (
            make_matrix(WEIGHT_ONLY["mxfp4"], 2 * inner, hidden, CPU),
            make_matrix(WEIGHT_ONLY["mxfp4"], hidden, inner, CPU),
        )
        for _ in range(3)
    ]
    packed = weight_only_hopper_experts.empty(3, *pairs[0], CPU)
    for place, pair in enumerate(pairs):
        weight_only_hopper_experts.put(packed, place, *pair)
    return packed


@pytest.mark.filterwarnings("ignore:invalid value")
def test_few_tokens_without_an_expert_and_with_one_twice(poisoned: None) -> None:
    """An id of -1 adds nothing, whatever lies in its row, and its weight; an expert that comes twice counts twice."""
    packed, x = mxfp4_experts(104, 64), torch.randn(3, 104).half()
    weights = torch.tensor([[0.5, torch.nan], [torch.nan, torch.nan], [0.25, 0.5]])
    ids = torch.tensor([[2, -1], [-1, -1], [1, 1]], dtype=torch.int32)
    x[1] = torch.nan
    y = weight_only_hopper_experts.run(x, weights, ids, packed)
    assert torch.equal(y[1], torch.zeros(104).half())
    for row, expert, weight in ((0, 2, 0.5), (2, 1, 0.75)):
        one = torch.full((1, 1), expert, dtype=torch.int32)
        expected = weight_only_hopper_experts.run(x[row : row + 1], torch.full((1, 1), weight), one, packed)
        torch.testing.assert_close(y[row], expected[0], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("waits", [False, True])
def test_a_residual_that_comes_late_to_few_tokens(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is joined before the last kernel, which starts early only if nothing else must end first."""
    packed, x = mxfp4_experts(96, 64), torch.randn(2, 192).half()[:, ::2]
    weights, ids = torch.rand(2, 2), torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    residual = torch.randn(2, 96).half()
    expected = weight_only_hopper_experts.run(x.contiguous(), weights, ids, packed, None, residual.clone())
    spy = LateResidual(residual, waits=waits)
    spy.watch(pairs_alone, ("_alone_up_kernel", "_alone_down_kernel"), monkeypatch)
    assert torch.equal(weight_only_hopper_experts.run(x, weights, ids, packed, None, spy.late, spy.join), expected)
    assert spy.launched == [("_alone_up_kernel", True), ("join", waits), ("_alone_down_kernel", not waits)]


def test_warps_of_few_tokens() -> None:
    """gpt-oss-20b; half of its inputs; experts that are too large, and too many of a token, whose pairs are sorted."""
    assert pairs_alone.warps_of(2880, 2880, 4) == pairs_alone.warps_of(2880, 1440, 4) == (4, 8)
    assert pairs_alone.warps_of(4096, 2048, 8) == (8, 8)
    assert pairs_alone.warps_of(7168, 3072, 16) == (16, 16)
    assert not any(pairs_alone.warps_of(*sizes) for sizes in ((2880, 2880, 17), (16384, 512, 1), (512, 16384, 4)))


@pytest.mark.parametrize("power", [0, 1, 100, 128])
def test_weights_with_the_smallest_and_largest_scales(power: int) -> None:
    matrix = make_matrix(WEIGHT_ONLY["mxfp4"], 64, 160, CPU)
    matrix.scale.fill_(power)
    for kernel in (weight_only, weight_only_hopper):
        packed = kernel.pack(matrix)
        assert not isinstance(packed, QuantizedMatrix) and torch.equal(packed.unpack(torch.float32), dequantize(matrix))


def test_rows_are_brought_into_the_order_of_experts() -> None:
    """Tiles of 8 pairs of one expert each; pairs of other ranks' experts come last, and nobody reads their rows."""
    ids = torch.tensor([[0, 3], [3, 1], *[[3, 0]] * 9], dtype=torch.int32)
    x, expert_map = torch.randn(11, 40).half(), torch.tensor([1, -1, 2, 0], dtype=torch.int32)
    order, starts = _sort(ids, expert_map, 3)
    assert starts.tolist() == [0, 11, 21, 21]
    cut = pairs_in_words.Tiles(8, 3, 1)
    found = pairs_in_words.bring(x, order, starts, 2, cut)
    assert torch.equal(found.x[:21], x[order[:21] // 2])
    records = found.tiles.view(-1, 4)[:5].tolist()
    assert records == [[0, 0, 11, 4], [0, 8, 3, 4], [1, 11, 10, 4], [1, 19, 2, 4], [0, 0, 0, 4]]


def test_experts_of_other_ranks_add_nothing() -> None:
    for tokens in (1, 9):
        compare_experts(SCALED["int8 token"], tokens, 4, 2, 256, 128, torch.float16, CPU, 4e-3, away=(1, 2))


@pytest.mark.parametrize("rows", [1, 3])
def test_strided_inputs_and_residuals_are_read_as_they_lie(rows: int) -> None:
    packed = scaled.pack(make_matrix(SCALED["int8 token"], 128, 256, CPU))
    x, residual = torch.randn(rows, 512).half()[:, ::2], torch.randn(128, rows).half().t()
    expected = scaled.run_add(x.contiguous(), packed, None, residual.clone(memory_format=torch.contiguous_format))
    assert torch.equal(scaled.run_add(x, packed, None, residual), expected)
