"""Products of few rows with two-byte weights on Hopper, against float64 on the GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.activation import ACTS
from quire.kernels.linear import cuda, some_hopper
from quire.kernels.triton_runtime import missing_hopper

from ..support.quantized_cases import activated

pytestmark = pytest.mark.skipif(bool(missing_hopper()), reason=missing_hopper() or "has Hopper's kernels")
SHAPES = [(6144, 4096), (1024, 1000), (1000, 520), (2048, 8), (4160, 12288)]


def operands(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x with large columns and a row of zeros, a weight, and a bias."""
    generator = torch.Generator("cuda").manual_seed(rows + n)
    x, weight, bias = (torch.randn(shape, generator=generator, device="cuda") for shape in ((rows, k), (n, k), (n,)))
    x[:, ::7] *= 30
    x[rows // 2] = 0
    return x.to(dtype), (weight * k**-0.5).to(dtype), bias.to(dtype)


def near(found: Tensor, truth: Tensor, roundings: int = 1) -> None:
    """Check every element, none of which may be unwritten. roundings: to the type of `found`."""
    bound = roundings * {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-12}[found.dtype]
    assert ((found.double() - truth).abs() <= bound * truth.abs() + bound * 0.05 * truth.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 32, 50, 64])
def test_products(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(rows, n, k, dtype)
    exact = x.double() @ weight.double().t()
    for y_type in (dtype, torch.float32):
        y = torch.full((rows, n), float("nan"), dtype=y_type, device="cuda")
        near(some_hopper.product(x, weight, None, y), exact)
    wide = torch.zeros(rows, k + 24, dtype=dtype, device="cuda")  # rows that the copy engine cannot read
    wide[:, 3 : k + 3] = x
    residual = torch.randn_like(exact).to(dtype)
    expected = exact + bias.double() + residual.double()
    near(some_hopper.product(wide[:, 3 : k + 3], weight, bias, residual, residual=residual), expected)
    columns = x.t().contiguous().t()  # stored by column
    near(some_hopper.product(columns, weight, None, torch.empty_like(residual)), exact)
    if n % 2 == 0:
        for act in ACTS:
            y = torch.full((rows, n // 2), float("nan"), dtype=dtype, device="cuda")
            near(some_hopper.product(x, weight, bias, y, act=act), activated(exact + bias.double(), act))


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_all_operations_use_it(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands(rows, 2048, 512, torch.bfloat16)
    packed, residual, scale = cuda.pack(weight), torch.randn(rows, 2048, device="cuda").bfloat16(), torch.rand(512)
    scale = scale.to(x)

    def all_of_them() -> list[Tensor]:
        return [
            cuda.run(x, packed, bias),
            cuda.run_float(x, packed, None),
            cuda.run_gated(x, packed, bias),
            cuda.run_add(x, packed, bias, residual.clone()),
            cuda.run_norm(x, scale, 1e-6, packed, bias),
            cuda.run_norm_gated(x, scale, 1e-6, packed, bias),
        ]

    calls: list[int] = []
    product = some_hopper.product

    def counted(*given: Any, **more: Any) -> Tensor:
        calls.append(1)
        return product(*given, **more)

    monkeypatch.setattr(some_hopper, "product", counted)
    ours = all_of_them()
    assert len(calls) == (6 if rows > 1 else 0)
    monkeypatch.setattr(cuda, "some", lambda rows, weight: False)
    for one, other in zip(ours, all_of_them(), strict=True):
        near(one, other.double(), 4)  # cuBLAS rounds gate and up before their product
