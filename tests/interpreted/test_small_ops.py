"""The small kernels of a GPU: in Triton's interpreter against their references, and compiled for a Hopper GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from quire.args.rope import RopeArgs
from quire.kernels import triton_runtime
from quire.kernels.activation import ACTS, POINTWISE
from quire.kernels.activation import inputs as activation_inputs
from quire.kernels.activation import ref as activation_ref
from quire.kernels.activation import triton as activation
from quire.kernels.heads import inputs as heads_inputs
from quire.kernels.heads import ref as heads_ref
from quire.kernels.heads import triton as heads
from quire.kernels.linear import cuda, gemv
from quire.kernels.linear import inputs as linear_inputs
from quire.kernels.linear import ref as linear_ref
from quire.kernels.norm import inputs as norm_inputs
from quire.kernels.norm import ref as norm_ref
from quire.kernels.norm import triton as norm
from quire.kernels.rope import triton as rope
from quire.kernels.rope.rotary import Rotary

from ..support.thinned import thinned

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative to the largest value
EPS = 1e-5


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.set_deterministic_debug_mode("error")
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bound = TOLERANCE[expected.dtype] * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", (*norm_inputs.SHAPES, *norm_inputs.HEAD_SHAPES, (2, 1030)), ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = norm_inputs.make(shape, dtype)
    close(norm.rms_norm(x, weight, EPS), norm_ref.rms_norm(x, weight, EPS))
    wide = torch.cat((x, x), -1)[..., : shape[-1]]
    close(norm.rms_norm(wide, weight, EPS), norm_ref.rms_norm(x, weight, EPS))
    transposed = x.transpose(0, -1).contiguous().transpose(0, -1)
    close(norm.rms_norm(transposed, weight, EPS), norm_ref.rms_norm(x, weight, EPS))
    assert norm.rms_norm(x[:0], weight, EPS).shape == (0, *shape[1:])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rms_norm_with_a_residual_and_a_factor(dtype: torch.dtype) -> None:
    x, weight = norm_inputs.make((7, 100), dtype)
    residual, factor = norm_inputs.make((7, 100), dtype, 1)[0], torch.tensor([0.625])
    close(norm.rms_norm(x, weight, EPS, residual, factor), norm_ref.rms_norm(x, weight, EPS, residual, factor))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_layer_norm_with_a_bias(dtype: torch.dtype) -> None:
    x, weight = norm_inputs.make((7, 100), dtype)
    bias = norm_inputs.make((1, 100), dtype, 1)[0][0]
    for added in (None, bias):
        close(norm.layer_norm(x, weight, EPS, added), norm_ref.layer_norm(x, weight, EPS, added))


def test_rms_norm_uses_eps() -> None:
    x, weight = torch.full((1, 8), 1e-3), torch.ones(8)
    close(norm.rms_norm(x, weight, 1e-2), norm_ref.rms_norm(x, weight, 1e-2))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", (*activation_inputs.SHAPES, (2, 2100)), ids=str)
@pytest.mark.filterwarnings("ignore:overflow")
def test_gated(shape: tuple[int, int], dtype: torch.dtype, act: str) -> None:
    gate_up = activation_inputs.make(shape, dtype)
    close(activation.gated(gate_up, act), activation_ref.gated(gate_up, act))
    assert activation.gated(gate_up[:0], act).shape == (0, shape[1] // 2)
    gate, up = gate_up.chunk(2, 1)
    assert torch.equal(activation.gated(gate.contiguous(), act, up), activation.gated(gate_up, act))


@pytest.mark.parametrize("act", POINTWISE)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.filterwarnings("ignore:overflow")
def test_pointwise(dtype: torch.dtype, act: str) -> None:
    x = activation_inputs.make((2, 1050), dtype)
    close(activation.pointwise(x, act), activation_ref.pointwise(x, act))
    assert torch.equal(activation.pointwise(x[:, :100], act), activation.pointwise(x, act)[:, :100])
    assert activation.pointwise(torch.full((1, 3), torch.nan, dtype=dtype), act).isnan().all()
    assert activation.pointwise(x[:0], act).shape == (0, 1050)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", (*activation_inputs.SHAPES, (2, 2100)), ids=str)
@pytest.mark.filterwarnings("ignore:overflow")
def test_opened(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, gate = activation_inputs.make(shape, dtype).chunk(2, 1)
    close(activation.opened(x, gate), activation_ref.opened(x, gate))
    assert activation.opened(x[:0], gate[:0]).shape == (0, shape[1] // 2)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_an_activation_of_what_is_far_out(act: str) -> None:
    far = [-3e38, -1e4, -89.5, -7.5, 7.5, 89.5, 3e38, -torch.inf, torch.inf, torch.nan]
    for gates, ups in ((far, [0.5]), ([-0.25, 7.5, 3e38, torch.inf, torch.nan], far)):
        gate = torch.tensor(gates).repeat(len(ups))
        gate_up = torch.cat((gate, torch.tensor(ups).repeat_interleave(len(gates))))[None]
        expected = activation_ref.gated(gate_up, act)
        torch.testing.assert_close(activation.gated(gate_up, act), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", (*heads_inputs.CASES, *heads_inputs.VALUE_CASES), ids=str)
def test_heads(case: heads_inputs.Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, and the whole cache: what was not written is NaN as before. With few rows to a program, and with many."""
    if case.tokens > 9:
        monkeypatch.setattr(heads, "FEW", 0)
    *given, _, slots = heads_inputs.make(case, dtype)
    qkv, weight, cos, sin = given
    kv, other, again = (heads_inputs.make(case, dtype)[4] for _ in range(3))
    expected = heads_ref.prepare(qkv, weight, EPS, cos, sin, other, slots, case.values)
    close(heads.prepare(qkv, weight, EPS, cos, sin, kv, slots, case.values), expected)
    monkeypatch.setattr(heads, "FEW", 0)
    close(heads.prepare(qkv, weight, EPS, cos, sin, again, slots, case.values), expected)
    for written in (kv, again):
        for actual, wanted in ((written.k, other.k), (written.v, other.v)):
            assert torch.equal(actual.isnan(), wanted.isnan())
            close(actual.nan_to_num(), wanted.nan_to_num())


def test_heads_take_no_tokens_and_no_strange_strides() -> None:
    *given, kv, slots = heads_inputs.make(heads_inputs.CASES[2], torch.float32)
    qkv, weight, cos, sin = given
    assert heads.prepare(qkv[:0], weight, EPS, cos[:0], sin[:0], kv, slots[:0]).shape == (0, 3, 20)
    with pytest.raises(ValueError, match="strides"):
        heads.prepare(qkv.transpose(1, 2).contiguous().transpose(1, 2), weight, EPS, cos, sin, kv, slots)


@pytest.mark.parametrize("dim", [2, 64, 80])
@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_rotation(kind: str, dim: int) -> None:
    """Up to a million tokens, to one unit in the last place of bfloat16."""
    scaled = {"factor": 4.0, "original_max_position": 4096} if kind == "yarn" else {}
    rotary = Rotary(RopeArgs(kind=kind, theta=1e6, **scaled), dim, torch.device("cpu"), width=dim)
    positions = torch.cat((torch.arange(40), torch.tensor([4095, 131071, 999_983, 1_048_575])))
    for dtype, bound in ((torch.bfloat16, 2.0**-7), (torch.float32, 1e-6)):
        rows = rope.rotation_rows(positions, rotary.frequencies, rotary.scale, dtype)
        for actual, expected in zip(rows, rotary.rows(positions, dtype), strict=True):
            assert actual.dtype == dtype
            torch.testing.assert_close(actual, expected, rtol=bound, atol=2e-7)


# The interpreter multiplies matrices of bfloat16 by their bits: there are none in the kernel for more than 4 rows here.
ROWS = [
    (1, torch.bfloat16),
    (3, torch.float16),
    (4, torch.bfloat16),
    (5, torch.float16),
    (13, torch.float16),
    (40, torch.float16),
]
SHAPES = [(8, 8), (34, 272), (16, 1056)]  # N, K


@pytest.mark.parametrize(("rows", "dtype", "n", "k", "bias"), thinned(ROWS, SHAPES, (True, False)), ids=str)
def test_few_rows(rows: int, dtype: torch.dtype, n: int, k: int, bias: bool) -> None:
    x, weight, offset = linear_inputs.make((rows, n, k), dtype)
    added = offset if bias else None
    exact = linear_ref.run_float(x.double().float(), weight, added)
    close(gemv.product(x, weight, added), exact.to(dtype))
    close(gemv.product(x, weight, added, out=torch.empty(rows, n)), exact)
    residual = torch.randn(rows, n).to(dtype)
    expected = (exact + residual.float()).to(dtype)
    close(gemv.product(x, weight, added, residual=residual), expected)
    close(gemv.product(x, weight, added, residual=residual, out=residual), expected)
    scale = torch.rand(k).add(0.5).to(dtype)
    product = linear_ref.run_float(norm_ref.rms_norm(x.float(), scale.float(), EPS), weight, added)
    close(gemv.product(x, weight, added, norm=scale, eps=EPS), product.to(dtype))
    for act in ACTS:
        expected = activation_ref.gated(product, act).to(dtype)
        close(gemv.product(x, weight, added, norm=scale, eps=EPS, act=act), expected)


@pytest.mark.parametrize("sizes", [(16, 32, 4, 2, 4), (32, 64, 4, 2, 1), (16, 16, 4, 2, 2)])
def test_every_way_to_walk(sizes: tuple[int, int, int, int, int]) -> None:
    walk = gemv.Tiles(*sizes)
    x, weight, bias = linear_inputs.make((9, 50, 200), torch.float16)
    close(gemv.product(x, weight, bias, walk=walk), linear_ref.run(x, weight, bias))


@pytest.mark.parametrize("rows", [4, 16])
def test_a_row_depends_on_nothing_but_itself(rows: int) -> None:
    dtype = torch.bfloat16 if rows == 4 else torch.float16
    x, weight, _ = linear_inputs.make((rows, 40, 264), dtype)
    expected = gemv.product(x, weight)
    x[1] = float("nan")
    actual = gemv.product(x, weight)
    assert actual[1].isnan().all() and torch.equal(actual[2:], expected[2:]) and torch.equal(actual[0], expected[0])


@pytest.mark.parametrize("rows", [0, 3, 16, 20, 70])
def test_both_ways_are_one_operation(rows: int) -> None:
    """The choice between gemv and cuBLAS (here PyTorch's) shows in no result."""
    x, weight, bias = linear_inputs.make((rows, 40, 64), torch.float16)
    packed, scale = cuda.pack(weight.clone()), torch.rand(64).half()
    normed, exact = norm_ref.rms_norm(x, scale, EPS), linear_ref.run_float(x, weight, bias)
    assert cuda.few(rows, weight) == (0 < rows <= cuda.FEW_ROWS)
    if not rows:
        assert cuda.run(x, packed, bias).shape == (0, 40)
        return
    close(cuda.run(x, packed, bias), exact.half())
    close(cuda.run_float(x, packed, bias).half(), exact.half())
    out = torch.full((rows, 40), float("nan"))
    assert cuda.run_float(x, packed, bias, out) is out
    close(out.half(), exact.half())
    for act in ACTS:
        close(cuda.run_gated(x, packed, bias, act), activation_ref.gated(exact, act).half())
        wide = linear_ref.run_float(normed, weight, bias)
        close(cuda.run_norm_gated(x, scale, EPS, packed, bias, act), activation_ref.gated(wide, act).half())
    with pytest.raises(ValueError, match="activation 'relu' does not exist"):
        cuda.run_gated(x, packed, bias, "relu")
    close(cuda.run_norm(x, scale, EPS, packed, bias), linear_ref.run(normed, weight, bias))
    for added in (bias, None):
        residual = torch.randn(rows, 40).half()
        expected = (linear_ref.run_float(x, weight, added) + residual.float()).half()
        taken = cuda.run_add(x, packed, added, residual)
        close(taken, expected)
        assert taken.data_ptr() == residual.data_ptr()


def test_rows_of_a_weight() -> None:
    _, weight, _ = linear_inputs.make((1, 70, 40), torch.bfloat16)
    ids = torch.tensor([0, 69, 31, 3, 64])
    assert torch.equal(cuda.rows(cuda.pack(weight), ids), weight[ids])
    found = cuda.rows(weight, torch.tensor([70, -1, 2, 1 << 40]))
    assert found.isnan().all(dim=1).tolist() == [True, True, False, True]
    assert cuda.rows(weight, ids[:0]).shape == (0, 40)


def test_compiles_for_hopper(compiled: Callable[[str], set[str]]) -> None:
    """The configurations of production; with --full all."""
    assert compiled("compile_small_ops") == {
        "_few_kernel",
        "_some_kernel",
        "_gather_kernel",
        "_norm_kernel",
        "_heads_kernel",
        "_gated_kernel",
        "_pointwise_kernel",
        "_opened_kernel",
        "_rotation_kernel",
    }
