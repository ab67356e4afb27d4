"""Queries that grow with their position, in every type, against the formula in float64."""

import pytest
import torch

from quire.args.layers import ScoreArgs
from quire.layers.attention import QueryGrowth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ahead", [0, 1])  # of Ministral-3, and of Llama 4
def test_the_product_is_rounded_once(dtype: torch.dtype, ahead: int) -> None:
    growth = QueryGrowth(ScoreArgs(growth=0.1, trained=8, ahead=ahead), torch.device("cpu"))
    q, positions = torch.randn(9, 3, 16).to(dtype), torch.tensor([0, 6, 7, 8, 15, 16, 500, 8 * 4095 - ahead, 90])
    factors = 1 + 0.1 * torch.log1p((positions.double() + ahead).div(8).floor())
    found = growth(q, positions)
    assert found.dtype == dtype and found.is_contiguous()
    bound = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    expected = q.double() * factors[:, None, None]
    assert ((found.double() - expected).abs() <= bound * expected.abs() + 1e-7).all()
