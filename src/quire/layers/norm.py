"""RMS normalization with a learned scale."""

import torch
from torch import Tensor, nn

from quire.layers.context import Build


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight; the weight is [width]."""

    weight: Tensor

    def __init__(self, at: str, eps: float, build: Build) -> None:
        super().__init__()
        self.at, self.kernel, self.eps, self.device = at, build.kernels.norm, eps, build.device

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        self.weight = tensors["weight"].to(self.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of each row of x, [T, width] -> [T, width]."""
        return self.kernel.rms_norm(x, self.weight, self.eps)


class HeadNorm(nn.Module):
    """Weights of the RMS norms of query and key heads, stacked by head, so that one call normalizes both."""

    weight: Tensor  # [query heads + KV heads, head_dim]

    def __init__(self, at: str, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
        super().__init__()
        self.at, self.device, self._heads = at, device, (num_heads, num_kv_heads)

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Repeat the weights "q" and "k" for every head and stack them, on the layer's device. See `Loads`."""
        q, k = (tensors[name].expand(heads, -1) for name, heads in zip("qk", self._heads, strict=True))
        self.weight = torch.cat((q, k)).to(self.device)

    def rows(self, name: str) -> Tensor:
        """The weights of the heads of "q" or "k", [heads, head_dim]."""
        return self.weight[: self._heads[0]] if name == "q" else self.weight[self._heads[0] :]
