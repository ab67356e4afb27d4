"""Norm, rope, activation and linear: every implementation against the reference, on fresh random inputs."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import activation, heads, linear, norm, rope  # noqa: F401  (the operations under test)
from quire.kernels.activation import ACTS, POINTWISE
from quire.kernels.activation import cpu as activation_cpu
from quire.kernels.activation import inputs as activation_inputs
from quire.kernels.activation import native as activation_native
from quire.kernels.activation import ref as activation_ref
from quire.kernels.activation import triton as activation_triton
from quire.kernels.heads import cpu as heads_cpu
from quire.kernels.heads import inputs as heads_inputs
from quire.kernels.heads import native as heads_native
from quire.kernels.heads import ref as heads_ref
from quire.kernels.linear import cpu as linear_cpu
from quire.kernels.linear import inputs as linear_inputs
from quire.kernels.linear import native as linear_native
from quire.kernels.linear import panels as linear_panels
from quire.kernels.linear import ref as linear_ref
from quire.kernels.norm import cpu as norm_cpu
from quire.kernels.norm import inputs as norm_inputs
from quire.kernels.norm import native as norm_native
from quire.kernels.norm import ref as norm_ref
from quire.kernels.rope import cpu as rope_cpu
from quire.kernels.rope import inputs as rope_inputs
from quire.kernels.rope import ref as rope_ref
from quire.kernels.select import here
from quire.kernels.supports import SUPPORTS, Support

# Relative to the largest value: float32 rounds at 6e-8, bfloat16 at 4e-3, and each op rounds a few times.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


def support(implementation: ModuleType) -> Support:
    _, _, op, name = implementation.__name__.split(".")
    return SUPPORTS[op][name]


def missing(implementation: ModuleType) -> str:
    return next(filter(None, map(here, support(implementation).needs)), "")


def fast(*implementations: ModuleType) -> Any:
    """Return a test parameter for each implementation; one that cannot run here is skipped, with the reason."""
    return pytest.mark.parametrize(
        "impl",
        [
            pytest.param(
                m,
                id=m.__name__.rpartition(".")[2],
                marks=pytest.mark.skipif(bool(why := missing(m)), reason=why or "runs"),
            )
            for m in implementations
        ],
    )


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bound = TOLERANCE[expected.dtype] * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


@fast(norm_cpu, norm_native)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", norm_inputs.SHAPES + norm_inputs.HEAD_SHAPES, ids=str)
def test_rms_norm(impl: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = norm_inputs.make(shape, dtype)
    weight = weight[0] if len(shape) == 2 and weight.dim() == 2 else weight
    before = x.clone()
    close(impl.rms_norm(x, weight, 1e-5), norm_ref.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@fast(norm_cpu, norm_native)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_with_a_bias(impl: ModuleType, dtype: torch.dtype) -> None:
    x, weight = norm_inputs.make((7, 100), dtype)
    bias = norm_inputs.make((1, 100), dtype, 1)[0][0]
    close(impl.layer_norm(x, weight, 1e-5, bias), norm_ref.layer_norm(x, weight, 1e-5, bias))


@fast(norm_cpu, norm_native)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_uses_eps(impl: ModuleType, dtype: torch.dtype) -> None:
    x, weight = torch.full((1, 8), 1e-3, dtype=dtype), torch.ones(8, dtype=dtype)
    close(impl.rms_norm(x, weight, 1e-2), norm_ref.rms_norm(x, weight, 1e-2))
    assert norm_ref.rms_norm(x, weight, 1e-2).max() < 0.02


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", rope_inputs.SHAPES, ids=str)
def test_rope(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, cos, sin = rope_inputs.make(shape, dtype)
    close(rope_cpu.apply_rope(x, cos, sin), rope_ref.apply_rope(x, cos, sin))
    turned = rope_ref.apply_rope(x, cos, sin).float()
    torch.testing.assert_close(turned.norm(dim=-1), x.float().norm(dim=-1), rtol=2e-2, atol=1e-2)


def activation_of(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """The activation in the dtype of gate, by PyTorch's own functions; gpt-oss by its formula."""
    if act == "silu":
        return torch.nn.functional.silu(gate) * up
    if act in ("gelu_tanh", "gelu"):
        return torch.nn.functional.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none") * up
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@pytest.mark.parametrize("act", ACTS)
def test_the_reference_is_the_formula(act: str) -> None:
    gate_up = activation_inputs.make((17, 512), torch.float64)
    expected = activation_of(*gate_up.chunk(2, 1), act)
    torch.testing.assert_close(activation_ref.gated(gate_up, act), expected, rtol=1e-5, atol=1e-6)


@fast(activation_cpu, activation_native)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", activation_inputs.SHAPES, ids=str)
def test_gated(impl: ModuleType, shape: tuple[int, int], dtype: torch.dtype, act: str) -> None:
    gate_up = activation_inputs.make(shape, dtype)
    close(impl.gated(gate_up, act), activation_ref.gated(gate_up, act))
    if act == "silu":
        assert torch.equal(impl.gated(gate_up), impl.gated(gate_up, act))
    wide = torch.cat((gate_up, gate_up), 1)[:, shape[1] // 2 : shape[1]]  # up, in longer rows
    apart = impl.gated(gate_up[:, : shape[1] // 2].contiguous(), act, wide)
    close(apart, activation_ref.gated(gate_up, act))


@fast(activation_ref, activation_cpu, activation_native)
@pytest.mark.parametrize("act", POINTWISE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pointwise(impl: ModuleType, dtype: torch.dtype, act: str) -> None:
    x = activation_inputs.make((17, 202), dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "relu2": lambda x: x.relu() ** 2}
    exact = functions[act](x.double()) if act in functions else activation_of(x.double(), torch.ones(1), act)
    close(impl.pointwise(x, act), exact.to(dtype))
    close(impl.pointwise(x[:, :101], act), exact[:, :101].to(dtype))
    assert impl.pointwise(torch.full((1, 3), torch.nan, dtype=dtype), act).isnan().all()


@fast(activation_ref, activation_cpu, activation_native)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", activation_inputs.SHAPES, ids=str)
def test_opened(impl: ModuleType, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, gate = activation_inputs.make(shape, dtype).chunk(2, 1)
    close(impl.opened(x, gate), (x.double() / (1 + (-gate.double()).exp())).to(dtype))
    far = torch.tensor([[-3e38, -89.5, 0.0, 89.5, 3e38, torch.inf, -torch.inf]], dtype=dtype)
    assert impl.opened(torch.ones_like(far), far)[0, [0, 2, 4, 5, 6]].tolist() == [0, 0.5, 1, 1, 0]


@fast(activation_cpu, activation_native)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_activation_of_what_is_far_out(impl: ModuleType, dtype: torch.dtype, act: str) -> None:
    if impl is activation_native and (why := missing(impl)):
        pytest.skip(why)
    far = [-3e38, -1e4, -89.5, -88.5, -87.0, -7.5, 7.5, 89.5, 3e38, -torch.inf, torch.inf, torch.nan]
    for gates, ups in ((far, [0.5]), ([-0.25, 7.5, 3e38, torch.inf, torch.nan], far)):
        gate = torch.tensor(gates).repeat(len(ups))
        up = torch.tensor(ups).repeat_interleave(len(gates))
        gate_up = torch.cat((gate, up))[None].to(dtype)
        actual, expected = impl.gated(gate_up, act), activation_ref.gated(gate_up, act)
        bad = gate_up.isnan().unflatten(1, (2, -1)).any(1)
        assert actual[bad].isnan().all() and expected[bad].isnan().all()
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("impl", [activation_ref, activation_cpu, activation_native, activation_triton])
def test_an_unknown_activation_is_an_error(impl: ModuleType) -> None:
    if impl is activation_native and (why := missing(impl)):
        pytest.skip(why)
    with pytest.raises(
        ValueError, match="activation 'relu' does not exist: use one of silu, gelu_tanh, swiglu_oai, gelu"
    ):
        impl.gated(torch.ones(2, 8), "relu")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", linear_inputs.SHAPES, ids=str)
@fast(linear_cpu, linear_native, linear_panels)
def test_linear(impl: ModuleType, shape: tuple[int, int, int], dtype: torch.dtype, bias: bool) -> None:
    skip_unless_computed(impl, dtype)
    x, weight, offset = linear_inputs.make(shape, dtype)
    added = offset if bias else None
    packed = impl.pack(weight.clone())
    close(impl.run(x, packed, added), linear_ref.run(x, linear_ref.pack(weight), added))
    close(impl.run(x[:1], packed, added), linear_ref.run(x[:1], weight, added))
    assert impl.run(x[:0], packed, added).shape == (0, shape[1])
    wide = impl.run_float(x, packed, added)
    assert wide.dtype == torch.float32
    close(wide.to(dtype), linear_ref.run_float(x, weight, added).to(dtype))


@fast(linear_native, linear_panels)
@pytest.mark.parametrize("shape", linear_inputs.SHAPES, ids=str)
def test_linear_added_to_a_residual(impl: ModuleType, shape: tuple[int, int, int]) -> None:
    x, weight, bias = linear_inputs.make(shape, torch.bfloat16)
    residual = torch.randn(shape[:2], generator=torch.Generator().manual_seed(1)).bfloat16()
    before = residual.clone()
    expected = linear_ref.run_float(x, weight, bias) + residual.float()
    close(impl.run_add(x, impl.pack(weight), bias, residual), expected.bfloat16())
    assert torch.equal(residual, before)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 32), (3, 40, 24), (33, 98, 96), (130, 256, 64)], ids=str)
@fast(linear_native, linear_panels)
def test_gated_linear(impl: ModuleType, shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, act: str) -> None:
    skip_unless_computed(impl, dtype)
    x, weight, offset = linear_inputs.make(shape, dtype)
    x, added = 4 * x, offset if bias else None  # beyond the limits of the activations
    expected = activation_ref.gated(linear_ref.run_float(x, weight, added), act).to(dtype)
    close(impl.run_gated(x, impl.pack_gated(weight), added, act), expected)
    with pytest.raises(ValueError, match="activation 'relu' does not exist"):
        impl.run_gated(x, impl.pack_gated(weight), added, "relu")


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@fast(linear_native, linear_panels)
def test_a_gated_linear_of_what_is_far_out(impl: ModuleType, dtype: torch.dtype, act: str) -> None:
    """The weight is the identity, of few rows and of many."""
    skip_unless_computed(impl, dtype)
    far = torch.tensor([-1e38, -1e4, -89.5, -7.5, 7.5, 89.5, 1e38])
    weight, added = torch.eye(14).to(dtype), torch.zeros(14, dtype=dtype)
    for rows in (1, 40):
        x = torch.cat((far, far.flip(0))).repeat(rows, 1).to(dtype)
        actual = impl.run_gated(x, impl.pack_gated(weight), None, act)
        torch.testing.assert_close(actual, activation_ref.gated(x, act), rtol=1e-2, atol=1e-7)
    added[0], added[9] = torch.nan, torch.inf
    actual = impl.run_gated(x, impl.pack_gated(weight), added, act)
    torch.testing.assert_close(actual, activation_ref.gated(x + added, act), rtol=1e-2, atol=1e-7, equal_nan=True)


@fast(linear_native, linear_panels)
def test_a_native_row_depends_on_nothing_but_itself(impl: ModuleType) -> None:
    """Bit for bit: blocks and chunks do not change the order in which a row's products are added."""
    x, weight, _ = linear_inputs.make((1100, 70, 544), torch.bfloat16)
    packed = impl.pack(weight)
    whole = impl.run_float(x, packed, None)
    for rows in (slice(0, 1), slice(7, 24), slice(31, 64), slice(1000, 1100)):
        assert torch.equal(impl.run_float(x[rows], packed, None), whole[rows])


@fast(linear_native, linear_panels)
def test_what_a_row_holds_stays_in_it(impl: ModuleType) -> None:
    x, weight, _ = linear_inputs.make((40, 33, 40), torch.bfloat16)
    packed = impl.pack(weight)
    expected = impl.run(x, packed, None)
    x[5] = float("nan")
    x[39, 39] = float("inf")
    actual = impl.run(x, packed, None)
    assert actual[5].isnan().all() and not actual[39].isfinite().any()
    sound = [row for row in range(40) if row not in (5, 39)]
    assert torch.equal(actual[sound], expected[sound])


@fast(linear_native, linear_panels)
def test_rows_of_a_packed_weight(impl: ModuleType) -> None:
    _, weight, _ = linear_inputs.make((1, 70, 40), torch.bfloat16)
    packed = impl.pack(weight)
    ids = torch.tensor([0, 69, 31, 32, 15, 16, 17, 31, 3, 64])
    assert torch.equal(impl.rows(packed, ids).to(weight.dtype), weight[ids])
    assert impl.rows(packed, torch.tensor([70, -1, 2])).isnan().all(dim=1).tolist() == [True, True, False]


PANEL_SHAPES = ((1, 7, 5), (2, 33, 64), (3, 100, 130), (4, 65, 513), (5, 256, 256), (13, 31, 300), (400, 70, 259))


@fast(linear_panels)
@pytest.mark.parametrize("shape", PANEL_SHAPES, ids=str)
def test_products_of_bfloat16_have_the_accuracy_of_float32(impl: ModuleType, shape: tuple[int, int, int]) -> None:
    """Pairs that a unit multiplies are neither rounded nor swapped; a row among many has the bits of the row alone."""
    x, weight, bias = linear_inputs.make(shape, torch.bfloat16)
    expected = x.double() @ weight.double().t() + bias.double()
    packed = impl.pack(weight)
    actual = impl.run_float(x, packed, bias)
    assert (actual - expected).abs().max() <= 3e-6 * expected.abs().max()
    assert torch.equal(actual[-1:], impl.run_float(x[-1:], packed, bias))
    assert torch.equal(actual[:3], impl.run_float(x[:3], packed, bias))
    gates = torch.cat((weight, weight.flip(0)))
    both = x.double() @ gates.double().t()
    wanted = torch.nn.functional.silu(both[:, : len(weight)]) * both[:, len(weight) :]
    gated = impl.run_gated(x, impl.pack_gated(gates), None)
    torch.testing.assert_close(gated.double(), wanted, rtol=1e-2, atol=1e-4)
    assert torch.equal(gated[-1:], impl.run_gated(x[-1:], impl.pack_gated(gates), None))


@fast(linear_panels)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("shape", PANEL_SHAPES, ids=str)
def test_weights_of_either_type_give_the_accuracy_of_float32(
    impl: ModuleType, shape: tuple[int, int, int], stored: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 on the same numbers. Columns are no whole panels, inputs no whole steps, rows no whole blocks."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, weight, bias = linear_inputs.make(shape, torch.float32)
    weight, gates = weight.to(stored), torch.cat((weight, weight.flip(0))).to(stored)
    expected = x.double() @ weight.double().t() + bias.double()
    bound = 3e-6 * expected.abs().max().item()
    packed, residual = impl.pack(weight), torch.randn(len(x), len(weight))
    actual = impl.run(x, packed, bias)
    assert (actual - expected).abs().max() <= bound
    assert torch.equal(actual, impl.run_float(x, packed, bias))
    assert torch.equal(actual[-1:], impl.run(x[-1:], packed, bias)), "a row depends on nothing but itself"
    assert torch.equal(packed.to_dense(), weight) and torch.equal(impl.pack_gated(gates).to_dense(), gates)
    torch.testing.assert_close(impl.run(x, impl.pack_gated(gates), None), impl.run(x, impl.pack(gates), None))
    assert (impl.run_add(x, packed, bias, residual) - expected - residual).abs().max() <= bound
    strided = torch.cat((x, torch.full_like(x, torch.nan)), 1)[:, : x.shape[1]]
    assert torch.equal(impl.run(strided, packed, bias), actual)
    gate, up = (x.double() @ gates.double().t()).chunk(2, 1)
    gated = torch.nn.functional.silu(gate) * up
    assert (impl.run_gated(x, impl.pack_gated(gates), None) - gated).abs().max() <= 1e-5 * gated.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", (*heads_inputs.CASES, *heads_inputs.VALUE_CASES), ids=str)
@fast(heads_cpu, heads_native)
def test_heads(impl: ModuleType, case: heads_inputs.Case, dtype: torch.dtype) -> None:
    """q, and the whole cache: what was not written is NaN as before."""
    *given, kv, slots = heads_inputs.make(case, dtype)
    qkv, weight, cos, sin = given
    other = heads_inputs.make(case, dtype)[4]
    expected = heads_ref.prepare(qkv, weight, 1e-5, cos, sin, other, slots, case.values)
    close(impl.prepare(qkv, weight, 1e-5, cos, sin, kv, slots, case.values), expected)
    for actual, expected in ((kv.k, other.k), (kv.v, other.v)):
        assert torch.equal(actual.isnan(), expected.isnan())
        close(actual.nan_to_num(), expected.nan_to_num())


def test_values_are_those_of_keys_before_their_norm() -> None:
    """By the formula: k over its root mean square, without weights or rotation. Kept values are not written."""
    case = heads_inputs.VALUE_CASES[2]
    qkv, weight, cos, sin, kv, slots = heads_inputs.make(case, torch.float32)
    k = qkv[:, case.heads[0] :]
    heads_ref.prepare(qkv, weight, 1e-5, cos, sin, kv, slots, "keys")
    written = kv.v[slots // case.block_size, :, slots % case.block_size]
    torch.testing.assert_close(written, k / (k.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    q, kept = heads_ref.prepare(qkv, None, 1e-5, cos, sin, kv, slots, "keys"), heads_inputs.make(case, torch.float32)[4]
    alone = heads_ref.prepare(qkv[:, : case.heads[0]], None, 1e-5, cos, sin, kept, slots, "kept")
    assert torch.equal(alone, q) and kept.k.isnan().all() and kept.v.isnan().all()


@fast(norm_cpu, norm_native)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_with_a_residual_and_a_factor(impl: ModuleType, dtype: torch.dtype) -> None:
    x, weight = norm_inputs.make((7, 100), dtype)
    residual, factor = norm_inputs.make((7, 100), dtype, 1)[0], torch.tensor([0.625])
    normed = norm_ref.rms_norm(x.float(), weight, 1e-5)
    for added in (None, residual):
        expected = ((normed if added is None else normed + added.float()) * 0.625).to(dtype)
        close(impl.rms_norm(x, weight, 1e-5, added, factor), expected)
        close(norm_ref.rms_norm(x, weight, 1e-5, added, factor), expected)


def linear_misuses(native: ModuleType) -> dict[str, Any]:
    x, weight, bias = torch.randn(3, 64).bfloat16(), torch.randn(40, 64).bfloat16(), torch.randn(40).bfloat16()
    ids = torch.tensor([1])
    plain, gated, sum_of = native.pack(weight), native.pack_gated(weight), torch.randn(3, 40).bfloat16()
    return {
        "x dtype": lambda: native.run(x.half(), plain, bias),
        "x width": lambda: native.run(x[:, :32], plain, bias),
        "bias dtype": lambda: native.run(x, plain, bias.float()),
        "bias shape": lambda: native.run(x, plain, bias[:32]),
        "residual dtype": lambda: native.run_add(x, plain, None, sum_of.float()),
        "residual rows": lambda: native.run_add(x, plain, None, sum_of[:2]),
        "residual width": lambda: native.run_add(x, plain, None, sum_of[:, :8]),
        "not gated": lambda: native.run_gated(x, plain, None),
        "gated": lambda: native.run_float(x, gated, None),
        "rows of gated": lambda: native.rows(gated, ids),
        "ids dtype": lambda: native.rows(plain, ids.int()),
        "weight dtype": lambda: native.pack(weight.half()),
    }


def small_misuses() -> dict[str, Any]:
    x = torch.randn(4, 8)
    *given, kv, slots = heads_inputs.make(heads_inputs.CASES[2], torch.float32)
    qkv, weight, cos, sin = given
    normalize, prepare = norm_native.rms_norm, heads_native.prepare
    return {
        "activation dtype": lambda: activation_native.gated(x.half()),
        "activation strides": lambda: activation_native.gated(x.t()),
        "gate strides": lambda: activation_native.opened(x, x.t()),
        "gate dtype": lambda: activation_native.opened(x, x.half()),
        "gate shape": lambda: activation_native.opened(x, x[:, 1:]),
        "norm dtype": lambda: normalize(x.half(), torch.ones(8).half(), 1e-5),
        "norm weight": lambda: normalize(x, torch.ones(8).bfloat16(), 1e-5),
        "norm factor": lambda: normalize(x, torch.ones(8), 1e-5, None, torch.ones(1).double()),
        "norm width": lambda: normalize(x, torch.ones(4), 1e-5),
        "heads slots": lambda: prepare(qkv, weight, 1e-5, cos, sin, kv, slots.int()),
        "heads few slots": lambda: prepare(qkv, weight, 1e-5, cos, sin, kv, slots[:-1]),
        "heads rotation": lambda: prepare(qkv, weight, 1e-5, cos[:-1], sin[:-1], kv, slots),
        "heads norm": lambda: prepare(qkv, weight[:-1], 1e-5, cos, sin, kv, slots),
        "heads dtype": lambda: prepare(qkv.bfloat16(), weight, 1e-5, cos, sin, kv, slots),
    }


def test_c_is_handed_no_wrong_memory() -> None:
    misuses = {} if missing(activation_native) else small_misuses()
    for kernel in (linear_native, linear_panels):
        if not missing(kernel):
            misuses |= {f"{kernel.__name__}: {name}": misuse for name, misuse in linear_misuses(kernel).items()}
    for name, misuse in misuses.items():
        with pytest.raises(ValueError, match="native |panels "):
            misuse()
            raise AssertionError(f"{name} was taken")


def skip_unless_computed(impl: ModuleType, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    if name not in support(impl).dtypes:
        pytest.skip(f"computes no {name}")
    if why := next(filter(None, map(here, support(impl).typed.get(name, ()))), ""):
        pytest.skip(why)
