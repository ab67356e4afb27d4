"""Linear projections, fused over their checkpoint parts, and how every layer's weights are packed."""

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from quire.layers.context import Build
from quire.layers.norm import RMSNorm
from quire.quantization import unquantized


class Linear(nn.Module):
    """[T, in_features] -> [T, sum of parts].

    `parts` maps each checkpoint part to its output rows, in stacking order; a projection of one part names it "".
    Parameters `weight` and `bias` exist until `pack`, which turns them into the kernel's layout.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool, build: Build) -> None:
        super().__init__()
        self.kernel, self.features = build.kernels.linear, build.kernels.features("linear")
        shapes = unquantized.describe(parts, in_features, bias)
        self.weight: nn.Parameter | None = build.parameter(*shapes["weight"])
        self.bias: nn.Parameter | None = build.parameter(*shapes["bias"]) if bias else None
        self.packed: unquantized.PackedLinear | None = None

    def pack(self) -> None:
        """Reorder the weights for the kernel and free the plain ones; once, after loading."""
        assert self.weight is not None, "packed twice"
        self.packed = unquantized.pack(self.kernel, self.weight, self.bias)
        self.weight = self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features]."""
        assert self.packed is not None, "run before pack()"
        return unquantized.run(self.kernel, x, self.packed)

    def normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """[T, in_features] -> the projection of norm(x), in one kernel where it has the feature "norm"."""
        if "norm" not in self.features:
            return self(norm(x))
        assert self.packed is not None, "run before pack()"
        return unquantized.run_norm(self.kernel, x, norm.weight, norm.eps, self.packed)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, in_features] -> residual [T, out_features] + the projection; perhaps in the residual's memory."""
        assert self.packed is not None, "run before pack()"
        if "add" in self.features:
            return unquantized.run_add(self.kernel, x, self.packed, residual)
        return residual + unquantized.run(self.kernel, x, self.packed)


class GatedLinear(Linear):
    """silu(gate(x)) * up(x): [T, in_features] -> [T, out_features], the two in one projection.

    In one kernel where it has the feature "gated", else a projection and an activation.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, build: Build) -> None:
        super().__init__(in_features, {"gate": out_features, "up": out_features}, bias, build)
        self.activation = build.kernels.activation
        self.fused = "gated" in self.features

    def pack(self) -> None:
        """See `Linear`."""
        if not self.fused:
            super().pack()
            return
        assert self.weight is not None, "packed twice"
        self.packed = unquantized.pack_gated(self.kernel, self.weight, self.bias)
        self.weight = self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features]."""
        if not self.fused:
            gated: Tensor = self.activation.silu_mul(super().forward(x))
            return gated
        assert self.packed is not None, "run before pack()"
        return unquantized.run_gated(self.kernel, x, self.packed)

    def normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """See `Linear`."""
        if not self.fused or "norm" not in self.features:
            return self(norm(x))
        assert self.packed is not None, "run before pack()"
        return unquantized.run_norm_gated(self.kernel, x, norm.weight, norm.eps, self.packed)


@runtime_checkable
class Packs(Protocol):
    """A layer whose loaded weights become something else before the first step."""

    def pack(self) -> None:
        """Do it; once, after loading."""


def pack_layers(model: nn.Module) -> None:
    """Call `pack` on every layer below `model` that has one, in order."""
    for module in model.modules():
        if module is not model and isinstance(module, Packs):
            module.pack()
