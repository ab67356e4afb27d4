"""Projections, fused over their checkpoint parts."""

from typing import Any

from torch import Tensor, nn

from quire.distributed import Group
from quire.layers.context import Build
from quire.layers.norm import RMSNorm
from quire.quantization.pack import linear as packed_linear


def add_sum(partial: Tensor, residual: Tensor, tp: Group) -> Tensor:
    """Return residual + the sum of the ranks' partial results.

    Every product whose weight is divided among ranks by columns ends here, so the residual is added once.
    """
    return tp.add(partial, residual)


class Linear(nn.Module):
    """This rank's slice of a projection, [T, in_features] -> [T, out_features].

    With a slice of rows, each rank computes some of the outputs. With a slice of columns, each rank has some of the
    inputs and its results are partial: `add` sums them over the ranks.
    """

    packed: packed_linear.PackedLinear

    def __init__(self, at: str, build: Build) -> None:
        super().__init__()
        self.at, self.device = at, build.device
        plan = build.linears[at]
        self.kernel, self.features = plan.load(), plan.features
        self.out_features, self.in_features = build.shape(f"{at}.weight")
        self.tp = build.tp if build.params[f"{at}.weight"].shard == "columns" else None

    def take(self, tensors: dict[str, Any], place: int) -> None:
        """Pack the parameters; the layer owns them from now on. See `Loads`."""
        self.packed = packed_linear.pack(self.kernel, tensors, self.device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features]."""
        return packed_linear.run(self.kernel, x, self.packed)

    def normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Return the projection of norm(x), [T, out_features]. Kernels with the feature "norm" fuse both."""
        if "norm" not in self.features:
            return self(norm(x))
        return packed_linear.run_norm(self.kernel, x, norm.weight, norm.eps, self.packed)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual [T, out_features] + the projection of x; it may reuse the memory of `residual`."""
        if self.tp is not None:
            return add_sum(self(x), residual, self.tp)
        if "add" in self.features:
            return packed_linear.run_add(self.kernel, x, self.packed, residual)
        return residual + self(x)


class GatedLinear(Linear):
    """silu(gate(x)) * up(x), [T, in_features] -> [T, out_features / 2]; gate and up are rows of the same weight.

    A kernel with the feature "gated" computes all of it; with others, an activation follows the projection.
    """

    def __init__(self, at: str, build: Build) -> None:
        super().__init__(at, build)
        self.activation = build.kernels.activation
        self.fused = "gated" in self.features

    def take(self, tensors: dict[str, Any], place: int) -> None:
        """Pack the parameters; the layer owns them from now on. See `Loads`."""
        pack = packed_linear.pack_gated if self.fused else packed_linear.pack
        self.packed = pack(self.kernel, tensors, self.device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features / 2]."""
        if not self.fused:
            gated: Tensor = self.activation.silu_mul(super().forward(x))
            return gated
        return packed_linear.run_gated(self.kernel, x, self.packed)

    def normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Return `forward` of norm(x). See `Linear`."""
        if not self.fused or "norm" not in self.features:
            return self(norm(x))
        return packed_linear.run_norm_gated(self.kernel, x, norm.weight, norm.eps, self.packed)
