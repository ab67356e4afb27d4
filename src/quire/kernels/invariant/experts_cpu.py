"""Experts on a CPU with the products of `linear/panels`; a token's experts are added in the order of its choice."""

from torch import Tensor

from quire.kernels.experts import panels
from quire.kernels.experts.cpu import run_each
from quire.kernels.experts.panels import Packed
from quire.kernels.experts.panels import empty as empty
from quire.kernels.experts.panels import put as put
from quire.kernels.experts.panels import way as way


def run(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts. See `quire.kernels.experts`."""
    return run_each(x, (weights, ids, expert_map), packed, residual, panels.expert, combine=_in_order)


def _in_order(weights: Tensor, parts: Tensor) -> Tensor:
    """Return the weighted sums [T, H] of parts [T, k, H], one expert after the other, each product rounded."""
    y = parts[:, 0].float() * weights[:, :1]
    for place in range(1, parts.shape[1]):
        y += parts[:, place].float() * weights[:, place : place + 1]
    return y
