"""Experts on NVIDIA GPUs: the products of `experts/triton.py` with the weights as the tall operand in every step.

Each pair of a token and one of its experts is a column of a product over all inputs in order, whatever pairs are
beside it. The rows of a token are added in the order of its choice. Few tokens take the same way, on tensor cores, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.experts.stacked import Packed
from quire.kernels.experts.stacked import destination as destination
from quire.kernels.experts.stacked import empty as empty
from quire.kernels.experts.stacked import put as put
from quire.kernels.experts.triton import Tiles, many

DEEP = 64  # inputs of an iteration
FEW = 24  # up to so many pairs per expert in the mean, a tile has 16 pairs
SMALL = Tiles(16, 64, DEEP, 4, 4, tall=True), Tiles(16, 64, DEEP, 4, 4, tall=True)
LARGE = Tiles(128, 64, DEEP, 4, 3, tall=True), Tiles(128, 64, DEEP, 4, 4, tall=True)
EXACT = Tiles(16, 32, 32, 4, 2), Tiles(16, 32, 32, 4, 2)  # of float32


def run(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
    join: Callable[[], bool] | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts.

    See `quire.kernels.experts`. The result overwrites a contiguous `residual`.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is None else residual.contiguous()
    experts = len(packed.down) if expert_map is None else len(expert_map)
    cut = EXACT if x.element_size() == 4 else SMALL if ids.numel() <= FEW * experts else LARGE
    if len(x):
        many(x, weights, ids, packed, expert_map, None if residual is None else y, y, cut, join=join)
    return y
