"""Normalization with a learned scale."""

import torch
from torch import Tensor, nn

from quire.args.layers import NormArgs
from quire.layers.context import Build


class Norm(nn.Module):
    """y = x / rms(x) * weight, or as `args` say; the weight is [width], float32 where 1 is added to it.

    A layer normalization may have a bias, which then has the weight's dtype.
    """

    weight: Tensor
    stored: Tensor  # the weight as the checkpoint has it

    def __init__(self, at: str, args: NormArgs, build: Build) -> None:
        super().__init__()
        self.at, self.kernel, self.device = at, build.kernels.norm, build.device
        self.eps, self.args = args.eps, args
        self.bias: Tensor | None = None

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        self.stored = tensors["weight"].to(self.device)
        self.weight = scale_of(self.stored, self.args)
        if "bias" in tensors:
            self.bias = tensors["bias"].to(self.device, self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of each row of x, [T, width] -> [T, width]."""
        if self.args.centered:
            return self.kernel.layer_norm(x, self.weight, self.eps, self.bias)
        return self.kernel.rms_norm(x, self.weight, self.eps)

    def added(self, x: Tensor, residual: Tensor, factor: Tensor | None = None) -> Tensor:
        """Return (residual + the norm of x) * factor, [T, width]; it may reuse the memory of `residual`.

        factor   [1] float32; None: 1
        """
        assert not self.args.centered, "no family adds a layer normalization"
        return self.kernel.rms_norm(x, self.weight, self.eps, residual, factor)


def scale_of(weight: Tensor, args: NormArgs) -> Tensor:
    """Return the numbers by which a norm multiplies: the weight, or 1 + weight in float32."""
    return weight.float() + 1 if args.plus_one else weight


class LayerFactor(nn.Module):
    """The number by which the result of a layer is multiplied."""

    weight: Tensor  # [1] float32

    def __init__(self, at: str, device: torch.device) -> None:
        super().__init__()
        self.at, self.device = at, device

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Move the number to the layer's device. See `Loads`."""
        self.weight = tensors["weight"].to(self.device).float()


class HeadNorm(nn.Module):
    """Weights of the RMS norms of query and key heads, stacked by head, so that one call normalizes both.

    Without KV heads, keys are not normalized here.
    """

    weight: Tensor  # [query heads + KV heads, head_dim]

    def __init__(self, at: str, num_heads: int, num_kv_heads: int, args: NormArgs, device: torch.device) -> None:
        super().__init__()
        self.at, self.device, self.args, self._heads = at, device, args, (num_heads, num_kv_heads)

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Repeat the weights "q" and "k" for every head and stack them, on the layer's device. See `Loads`."""
        sides = (tensors[name].expand(heads, -1) for name, heads in zip("qk", self._heads, strict=True) if heads)
        self.stored = torch.cat(list(sides)).to(self.device)
        self.weight = scale_of(self.stored, self.args)

    def rows(self, name: str) -> Tensor:
        """The weights of the heads of "q" or "k" as stored, [heads, head_dim]."""
        return self.stored[: self._heads[0]] if name == "q" else self.stored[self._heads[0] :]


class WideNorm(nn.Module):
    """RMS norms over all query heads together, and over all key heads together.

    A rank has some of the heads, so the ranks sum their squares.
    """

    weight: Tensor  # [numbers of queries and keys of this rank]

    def __init__(self, at: str, widths: tuple[int, int], args: NormArgs, build: Build) -> None:
        super().__init__()
        self.at, self.device, self.args, self.tp = at, build.device, args, build.groups.tp
        self.kernel, self._widths = build.kernels.norm, widths

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Join the weights "q" and "k", on the layer's device. See `Loads`."""
        assert not self.args.plus_one, "no family adds 1 to these weights"
        self.weight = torch.cat((tensors["q"], tensors["k"])).to(self.device)

    def rows(self, name: str) -> Tensor:
        """The weights of "q" or "k" as stored, in the order of this rank's heads."""
        return self.weight[: self._widths[0]] if name == "q" else self.weight[self._widths[0] :]

    def forward(self, qkv: Tensor) -> Tensor:
        """Normalize queries and keys of qkv [T, queries | keys | values] in place, and return it."""
        q, k, _ = qkv.split([*self._widths, qkv.shape[1] - sum(self._widths)], 1)
        weights = self.weight.split(self._widths)
        if self.tp is None:
            for part, weight in zip((q, k), weights, strict=True):
                part.copy_(self.kernel.rms_norm(part, weight, self.args.eps))
            return qkv
        # A rank with copies of another's KV heads counts their squares once more; so does the divisor.
        squares = torch.stack([part.float().square().sum(1) for part in (q, k)], 1)
        squares = self.tp.all_reduce(squares)
        counts = squares.new_tensor([width * self.tp.size for width in self._widths])
        factors = torch.rsqrt(squares / counts + self.args.eps)
        for i, (part, weight) in enumerate(zip((q, k), weights, strict=True)):
            part.copy_(part.float() * factors[:, i : i + 1] * weight.float())
        return qkv
