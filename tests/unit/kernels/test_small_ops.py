"""Norm, rope, activation and linear: every implementation against the reference, on fresh random inputs."""

import pytest
import torch

from quire.kernels import activation, linear, norm, rope  # noqa: F401  (the operations under test)
from quire.kernels.activation import cpu as activation_cpu
from quire.kernels.activation import inputs as activation_inputs
from quire.kernels.activation import ref as activation_ref
from quire.kernels.linear import cpu as linear_cpu
from quire.kernels.linear import inputs as linear_inputs
from quire.kernels.linear import ref as linear_ref
from quire.kernels.norm import cpu as norm_cpu
from quire.kernels.norm import inputs as norm_inputs
from quire.kernels.norm import ref as norm_ref
from quire.kernels.rope import cpu as rope_cpu
from quire.kernels.rope import inputs as rope_inputs
from quire.kernels.rope import ref as rope_ref

# Relative to the largest value: float32 rounds at 6e-8, bfloat16 at 4e-3, and each op rounds a few times.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bound = TOLERANCE[expected.dtype] * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", norm_inputs.SHAPES + norm_inputs.HEAD_SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, _, weight = norm_inputs.make(shape, dtype)
    weight = weight[0] if len(shape) == 2 and weight.dim() == 2 else weight
    before = x.clone()
    close(norm_cpu.rms_norm(x, weight, 1e-5), norm_ref.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_uses_eps(dtype: torch.dtype) -> None:
    x, weight = torch.full((1, 8), 1e-3, dtype=dtype), torch.ones(8, dtype=dtype)
    close(norm_cpu.rms_norm(x, weight, 1e-2), norm_ref.rms_norm(x, weight, 1e-2))
    assert norm_ref.rms_norm(x, weight, 1e-2).max() < 0.02


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", norm_inputs.SHAPES, ids=str)
def test_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = norm_inputs.make(shape, dtype)
    before = x.clone(), residual.clone()
    for actual, expected in zip(
        norm_cpu.add_rms_norm(x, residual, weight, 1e-6), norm_ref.add_rms_norm(x, residual, weight, 1e-6), strict=True
    ):
        close(actual, expected)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", rope_inputs.SHAPES, ids=str)
def test_rope(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, cos, sin = rope_inputs.make(shape, dtype)
    close(rope_cpu.apply_rope(x, cos, sin), rope_ref.apply_rope(x, cos, sin))
    turned = rope_ref.apply_rope(x, cos, sin).float()
    torch.testing.assert_close(turned.norm(dim=-1), x.float().norm(dim=-1), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", activation_inputs.SHAPES, ids=str)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = activation_inputs.make(shape, dtype)
    close(activation_cpu.silu_mul(gate_up), activation_ref.silu_mul(gate_up))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", linear_inputs.SHAPES, ids=str)
def test_linear(shape: tuple[int, int, int], dtype: torch.dtype, bias: bool) -> None:
    if linear_cpu.SUPPORT.missing:
        pytest.skip(linear_cpu.SUPPORT.missing)
    x, weight, offset = linear_inputs.make(shape, dtype)
    added = offset if bias else None
    packed = linear_cpu.pack(weight.clone())
    close(linear_cpu.run(x, packed, added), linear_ref.run(x, linear_ref.pack(weight), added))
    close(linear_cpu.run(x[:1], packed, added), linear_ref.run(x[:1], weight, added))
    assert linear_cpu.run(x[:0], packed, added).shape == (0, shape[1])
