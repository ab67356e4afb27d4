"""The matrix product in float32."""

from torch import Tensor


def pack(weight: Tensor) -> Tensor:
    """Return the weight itself."""
    return weight


def run(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. See `quire.kernels.linear`."""
    return run_float(x, packed, bias).to(x.dtype)


def run_float(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias in float32. See `quire.kernels.linear`."""
    product = x.float() @ packed.float().t()
    return product if bias is None else product + bias.float()
