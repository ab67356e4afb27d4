"""The short convolution as its formula reads, in float32."""

import torch
from torch import Tensor

from quire.kernels.shortconv import ShortConvWeights
from quire.kernels.states import StateMeta, StateView, convolved, courses


def mix(rows: Tensor, weights: ShortConvWeights, state: StateView, meta: StateMeta) -> Tensor:
    """Return y [T, C], and update the states. See `quire.kernels.shortconv`."""
    b, c, x = rows.chunk(3, 1)
    sums = torch.zeros(x.shape, device=rows.device)
    for one in courses(b * x, state, meta):
        sums[one.first : one.first + len(one.rows) - one.replayed] = convolved(
            one.inputs[one.replayed :], weights.conv, weights.bias
        )
    return (c * sums).to(rows.dtype)
