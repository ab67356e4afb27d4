"""RMS normalization with a learned scale."""

from torch import Tensor, nn

from quire.layers.context import Build


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight; the weight is [width]."""

    def __init__(self, width: int, eps: float, build: Build) -> None:
        super().__init__()
        self.kernel = build.kernels.norm
        self.eps = eps
        self.weight = build.parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]."""
        return self.kernel.rms_norm(x, self.weight, self.eps)
