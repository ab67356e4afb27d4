"""Projections, fused over their checkpoint parts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.kernels.activation import POINTWISE, checked
from quire.kernels.pack.matrix import moved
from quire.layers.adapters import AdaptedProduct
from quire.layers.context import Build, StepContext
from quire.layers.norm import Norm


class PackedLinear(NamedTuple):
    """A weight in the kernel's own layout, which only the kernel understands, and the bias [N] or None."""

    weight: object
    bias: Tensor | None


def pack_linear(pack: Callable[[Any], object], tensors: dict[str, Any], device: torch.device) -> PackedLinear:
    """Pack a linear layer's weight by `pack`, a function of its kernel.

    tensors   "weight", a Tensor or QuantizedMatrix [N, K], and "bias" [N] if there is one. Do not use them afterwards
    device    device of the packed weight; packing runs on the device of the loaded weight
    """
    bias = tensors.get("bias")
    return PackedLinear(moved(pack(tensors["weight"]), device), None if bias is None else bias.to(device))


class Linear(nn.Module):
    """This rank's slice of a projection, [T, in_features] -> [T, out_features].

    With a slice of rows, each rank computes some of the outputs. With a slice of columns, each rank has some of the
    inputs and its results are partial: `add` sums them over the ranks. Every product gets the step, which tells the
    adapters of the rows.

    adapted   products of adapters; None: no adapter changes the layer
    """

    packed: PackedLinear
    adapted: AdaptedProduct | None = None

    def __init__(self, at: str, build: Build) -> None:
        super().__init__()
        self.at, self.device = at, build.device
        plan = build.linears[at]
        self.kernel, self.features = plan.load(), plan.features
        self.out_features, self.in_features = build.shape(f"{at}.weight")
        self.tp = build.groups.tp if build.params[f"{at}.weight"].shard == "columns" else None

    def take(self, tensors: dict[str, Any], place: int) -> None:
        self.packed = pack_linear(self.kernel.pack, tensors, self.device)

    def forward(self, x: Tensor, ctx: StepContext) -> Tensor:
        """[T, in_features] -> [T, out_features]."""
        return self.adapting(lambda: self.kernel.run(x, *self.packed), x, ctx)

    def adapting(self, product: Callable[[], Tensor], x: Tensor, ctx: StepContext) -> Tensor:
        """Return product() of x with the products of adapters added, for the rows that have one."""
        if ctx.adapters is None or self.adapted is None:
            return product()
        return self.adapted.around(product, x, ctx.adapters)

    def adapts(self, ctx: StepContext) -> bool:
        """Return True if adapters change the layer in this step: their products need its input and its product."""
        return ctx.adapters is not None and self.adapted is not None

    def fuses(self, norm: Norm, rows: int) -> bool:
        """Return True when the kernel computes the projection of norm(x) at once. rows: of x"""
        fused = "norm" in self.features or (rows == 1 and "norm of one row" in self.features)
        return fused and not norm.args.centered

    def normed(self, x: Tensor, norm: Norm, ctx: StepContext) -> Tensor:
        """Return the projection of norm(x), [T, out_features]. Kernels with the feature "norm" fuse both."""
        if not self.fuses(norm, len(x)) or self.adapts(ctx):
            return self(norm(x), ctx)
        y: Tensor = self.kernel.run_norm(x, norm.weight, norm.eps, *self.packed)
        return y

    def add(self, x: Tensor, residual: Tensor, ctx: StepContext) -> Tensor:
        """Return residual [T, out_features] + the projection of x; it may reuse the memory of `residual`."""
        if self.tp is not None:
            return self.tp.add(self(x, ctx), residual)
        if "add" in self.features:
            return self.adapting(lambda: self.kernel.run_add(x, *self.packed, residual), x, ctx)
        return residual + self(x, ctx)

    def summed(self, x: Tensor, ctx: StepContext) -> Tensor:
        """Return the projection of x, [T, out_features], summed over the ranks that have its inputs."""
        y = self(x, ctx)
        return y if self.tp is None else self.tp.all_reduce(y)


class FloatLinear(Linear):
    """A projection whose results stay float32, [T, in_features] -> [T, out_features]."""

    def forward(self, x: Tensor, ctx: StepContext) -> Tensor:
        """[T, in_features] -> [T, out_features] float32."""
        return self.adapting(lambda: self.kernel.run_float(x, *self.packed), x, ctx)

    def fuses(self, norm: Norm, rows: int) -> bool:
        """Return False: no kernel norms its input and leaves the result in float32."""
        return False


class ActivatedLinear(Linear):
    """act(up(x)), [T, in_features] -> [T, out_features]. act: word of `quire.kernels.activation.POINTWISE`."""

    def __init__(self, at: str, build: Build, act: str) -> None:
        super().__init__(at, build)
        self.act, self.activation = checked(act, POINTWISE), build.kernels.activation

    def forward(self, x: Tensor, ctx: StepContext) -> Tensor:
        """[T, in_features] -> [T, out_features]."""
        y: Tensor = self.activation.pointwise(super().forward(x, ctx), self.act)
        return y

    def normed(self, x: Tensor, norm: Norm, ctx: StepContext) -> Tensor:
        """Return `forward` of norm(x). See `Linear`."""
        if not self.fuses(norm, len(x)) or self.adapts(ctx):
            return self(norm(x), ctx)
        y: Tensor = self.activation.pointwise(super().normed(x, norm, ctx), self.act)
        return y


class GatedLinear(Linear):
    """act(gate(x), up(x)), [T, in_features] -> [T, out_features / 2]; gate and up are rows of the same weight.

    act     word of `quire.kernels.activation.ACTS`
    scale   factor on the gate before its activation
    A kernel with the feature "gated" computes all of it; with others, an activation follows the projection. So it does
    in a step with adapters, whose products are added between: then a kernel with "gated" has "plain" or "ungated", too.
    """

    def __init__(self, at: str, build: Build, act: str = "silu", scale: float = 1.0) -> None:
        super().__init__(at, build)
        self.act, self.scale = checked(act), scale
        self.activation = build.kernels.activation
        self.fused = "gated" in self.features and scale == 1

    def take(self, tensors: dict[str, Any], place: int) -> None:
        self.packed = pack_linear(self.kernel.pack_gated if self.fused else self.kernel.pack, tensors, self.device)

    def forward(self, x: Tensor, ctx: StepContext) -> Tensor:
        """[T, in_features] -> [T, out_features / 2]."""
        if ctx.adapters is not None and self.adapted is not None and self.scale == 1:
            return self.adapted.gated(
                lambda: self.kernel.run(x, *self.packed), x, ctx.adapters, self.act, self.activation
            )
        if not self.fused or self.adapts(ctx):
            rows = super().forward(x, ctx)
            if self.scale != 1:
                rows[:, : rows.shape[1] // 2] *= self.scale
            gated: Tensor = self.activation.gated(rows, self.act)
            return gated
        y: Tensor = self.kernel.run_gated(x, *self.packed, self.act)
        return y

    def normed(self, x: Tensor, norm: Norm, ctx: StepContext) -> Tensor:
        """Return `forward` of norm(x). See `Linear`."""
        if not (self.fused and self.fuses(norm, len(x))) or self.adapts(ctx):
            return self(norm(x), ctx)
        y: Tensor = self.kernel.run_norm_gated(x, norm.weight, norm.eps, *self.packed, self.act)
        return y
