"""The projections of one normed input: kernels that norm it for one row alone get it normed once for more."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.branch import Branch
from quire.layers.linear import Linear


@pytest.mark.parametrize(
    ("features", "rows", "norms"),
    [((), 1, 1), (("norm of one row",), 1, 0), (("norm of one row",), 2, 1), (("norm",), 1, 0), (("norm",), 2, 0)],
)
def test_a_norm_of_two_projections(features: tuple[str, ...], rows: int, norms: int) -> None:
    normed = list[int]()

    class Before:
        args = SimpleNamespace(centered=False)

        def __call__(self, x: Tensor) -> Tensor:
            normed.append(len(x))
            return x

    class Projection:
        def fuses(self, norm: Any, rows: int) -> bool:
            return Linear.fuses(SimpleNamespace(features=features), norm, rows)  # type: ignore[arg-type]

        def __call__(self, x: Tensor, ctx: object) -> Tensor:
            return x

    branch: Any = SimpleNamespace(before=Before(), project=lambda linear, x, ctx: x)
    ctx: Any = None
    linears: Any = [Projection(), Projection()]
    assert len(Branch.projections(branch, linears, torch.ones(rows, 4), ctx)) == 2
    assert normed == [rows] * norms
