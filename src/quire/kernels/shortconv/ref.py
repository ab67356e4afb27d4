"""The short convolution as its formula reads, in float32."""

import torch
from torch import Tensor

from quire.kernels.shortconv import ShortConvWeights
from quire.kernels.states import StateMeta, StateView, convolved


def mix(rows: Tensor, weights: ShortConvWeights, state: StateView, meta: StateMeta) -> Tensor:
    """Return y [T, C], and update the states. See `quire.kernels.shortconv`."""
    b, c, x = rows.chunk(3, 1)
    sums = torch.zeros(x.shape, device=rows.device)
    for at, sum_of_taps in convolved(b * x, weights.conv, weights.bias, state.columns, meta):
        sums[at] = sum_of_taps
    return (c * sums).to(rows.dtype)
