"""The way of a half of a layer from the residual stream and back."""

from collections.abc import Sequence

from torch import Tensor, nn

from quire.args.layers import LayerArgs, NormArgs
from quire.layers.context import Build, StepContext
from quire.layers.linear import Linear
from quire.layers.norm import LayerFactor, Norm


class Branch(nn.Module):
    """Half of a layer beside the residual stream: (residual + scale * after(half(before(x)))) * factor.

    before, after   norms; None: there is none
    factor          multiplies the result of the layer, whose last part this is; None: 1
    plain           True: the result of the half is added as it is, so that its last projection may add it
    """

    def __init__(
        self, at: str, layer: LayerArgs, norm: NormArgs, build: Build, factor: LayerFactor | None = None
    ) -> None:
        super().__init__()
        self.before = Norm(f"{at}_norm", norm, build) if layer.before else None
        self.after = Norm(f"{at}_after", norm, build) if layer.after else None
        self.scale = layer.residual
        self.factor = (factor,)  # in a tuple, so that it stays a child of the layer alone
        assert factor is None or self.after is not None, "no family has the factor without the norm"
        self.plain = self.after is None and self.scale == 1.0

    def read(self, x: Tensor) -> Tensor:
        """Return the input of the half, [T, hidden]."""
        return x if self.before is None else self.before(x)

    def project(self, linear: Linear, x: Tensor, ctx: StepContext) -> Tensor:
        """Return the half's first projection of its input."""
        return linear(x, ctx) if self.before is None else linear.normed(x, self.before, ctx)

    def projections(self, linears: Sequence[Linear], x: Tensor, ctx: StepContext) -> list[Tensor]:
        """Return the half's first projections of its input, which is normed once if kernels do not norm it."""
        if self.before is not None and not all(one.fuses(self.before, len(x)) for one in linears):
            normed = self.before(x)
            return [linear(normed, ctx) for linear in linears]
        return [self.project(linear, x, ctx) for linear in linears]

    def add(self, linear: Linear, x: Tensor, residual: Tensor, ctx: StepContext) -> Tensor:
        """Return the residual with the half's last projection, of x; it may reuse the memory of `residual`."""
        if self.plain:
            return linear.add(x, residual, ctx)
        return self.join(linear.summed(x, ctx), residual)

    def join(self, result: Tensor, residual: Tensor) -> Tensor:
        """Return the residual with the whole result of the half, [T, hidden]."""
        if self.after is not None:
            return self.after.added(result, residual, None if self.factor[0] is None else self.factor[0].weight)
        return residual + result * self.scale
