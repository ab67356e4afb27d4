"""Linear layers on CUDA, by the number of rows; kernels for few rows read the weight once.

            on Hopper, from 512 outputs on    elsewhere
1           gemv.py, with the norm in it      gemv.py
2           some_hopper.py                    gemv.py
3 to 64     some_hopper.py                    cuBLAS, gemv.py for the head
65 and up   cuBLAS                            cuBLAS

A packed weight is the weight itself. The shapes alone decide which of them runs. Without Triton cuBLAS always runs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import checked
from quire.kernels.activation.triton import gated
from quire.kernels.linear import gemv, some_hopper
from quire.kernels.norm.triton import rms_norm
from quire.kernels.triton_runtime import missing, missing_hopper

FEW_ROWS = 2  # up to so many rows gemv.py multiplies a weight that some_hopper.py cannot
HEAD = 65536  # from so many outputs on gemv.py multiplies up to MOST_ROWS rows of such a weight
LEAST = 512  # outputs from which some_hopper.py has enough programs


def few(rows: int, weight: Tensor) -> bool:
    """Return True if gemv.py multiplies x of `rows` rows with `weight`.

    gemv.py takes few rows only, and a weight of a 2-byte dtype whose rows are aligned to 16 bytes.
    """
    if weight.dtype == torch.float32 or weight.shape[1] % 8 or not rows or weight.is_cuda and missing():
        return False
    if some(rows, weight):
        return rows == 1
    return rows <= (gemv.MOST_ROWS if weight.shape[0] >= HEAD else FEW_ROWS)


def some(rows: int, weight: Tensor) -> bool:
    """Return True if some_hopper.py can multiply x of `rows` rows with `weight`."""
    if weight.dtype == torch.float32 or weight.shape[1] % 8 or weight.shape[0] < LEAST:
        return False
    return 0 < rows <= some_hopper.MOST_ROWS and weight.is_cuda and not missing_hopper()


def pack(weight: Tensor) -> Tensor:
    """Return the weight itself. Also set two options of PyTorch, so that cuBLAS adds split-K sums in float32."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return weight.contiguous()


pack_gated = pack


def run(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. See `quire.kernels.linear`."""
    rows = x.shape[0]
    if few(rows, packed):
        return gemv.product(x, packed, bias)
    if some(rows, packed):
        return some_hopper.product(x, packed, bias, x.new_empty(rows, packed.shape[0]))
    return F.linear(x, packed, bias)


def run_float(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in float32. See `quire.kernels.linear`."""
    if out is None:
        out = x.new_empty(x.shape[0], packed.shape[0], dtype=torch.float32)
    if few(x.shape[0], packed):
        return gemv.product(x, packed, bias, out=out)
    if some(x.shape[0], packed) and out.is_contiguous():
        return some_hopper.product(x, packed, bias, out)
    if x.is_cuda and x.dtype != torch.float32:
        torch.mm(x, packed.t(), out_dtype=torch.float32, out=out)
    else:
        torch.mm(x.float(), packed.float().t(), out=out)  # PyTorch's CPU has no products of two types
    return out if bias is None else out.add_(bias)


def run_add(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x @ weight.T + bias, which overwrites `residual`. See `quire.kernels.linear`."""
    if few(x.shape[0], packed) and residual.is_contiguous():
        return gemv.product(x, packed, bias, residual=residual, out=residual)
    if some(x.shape[0], packed) and residual.is_contiguous():
        return some_hopper.product(x, packed, bias, residual, residual=residual)
    if bias is not None:
        residual += bias
    return residual.addmm_(x, packed.t())


def run_gated(x: Tensor, packed: Tensor, bias: Tensor | None, act: str = "silu") -> Tensor:
    """Return the activation of (gate, up) = x @ weight.T + bias. See `quire.kernels.linear`."""
    if few(x.shape[0], packed):
        return gemv.product(x, packed, bias, act=checked(act))
    if some(rows := x.shape[0], packed):
        return some_hopper.product(x, packed, bias, x.new_empty(rows, packed.shape[0] >> 1), act=checked(act))
    return gated(F.linear(x, packed, bias), act)


def run_norm(x: Tensor, weight: Tensor, eps: float, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Apply an RMS norm with `weight` and `eps` to x; return `run` of the result. See `quire.kernels.linear`."""
    if few(x.shape[0], packed):
        return gemv.product(x, packed, bias, norm=weight, eps=eps)
    return run(rms_norm(x, weight, eps), packed, bias)


def run_norm_gated(
    x: Tensor, weight: Tensor, eps: float, packed: Tensor, bias: Tensor | None, act: str = "silu"
) -> Tensor:
    """Apply an RMS norm with `weight` and `eps` to x; return `run_gated` of the result. See `quire.kernels.linear`."""
    if few(x.shape[0], packed):
        return gemv.product(x, packed, bias, norm=weight, eps=eps, act=checked(act))
    return run_gated(rms_norm(x, weight, eps), packed, bias, act)


def rows(packed: Tensor, ids: Tensor) -> Tensor:
    """Return the rows `ids` of a packed weight (an embedding look-up). See `quire.kernels.linear`."""
    return gemv.gather(packed, ids)
