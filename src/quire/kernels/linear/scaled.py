"""Linear layers with 8-bit weights and 8-bit activations on Hopper: FP8 in blocks or channels, and INT8.

Rows     Kernel
1        FP8 in blocks: one_row/, in CUDA C++, where norm and quantization of x are fused. Others, and weights with few
         outputs: scaled_few.py, which fuses them, too, without tensor cores
2 to 64  scaled_hopper.py (Gluon) or, where Gluon is missing, scaled_some.py (Triton): tensor cores, sums of 128
         products are added in float32
more     FP8: cuBLASLt (`torch.nn.functional.scaled_mm`), which adds the same way. INT8: scaled_many.py

Measured on an H200 for the products of an 8B model (docs/performance.md). Weights are padded with zeros to a
multiple of 128 inputs. A weight whose N is no multiple of 64 runs the reference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import triton_runtime
from quire.kernels.activation import checked
from quire.kernels.activation.triton import gated
from quire.kernels.linear import quantized_ref, scaled_few, scaled_hopper, scaled_many, scaled_some
from quire.kernels.linear.epilogue import Epilogue
from quire.kernels.linear.scaled_weight import Scaled
from quire.kernels.norm.triton import rms_norm
from quire.kernels.one_row import linear as one_row
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.kernels.quantize.triton import FIXED, GROUP, TOKEN, quantize
from quire.kernels.triton_runtime import INTERPRETED, missing
from quire.kernels.words import product_words

FEW_ROWS = 1
RULES = {"group": GROUP, "token": TOKEN, "tensor": FIXED}


Packed = Scaled | QuantizedMatrix


def unsupported() -> str:
    """Return the reason why products of 8-bit weights and activations cannot run in this process, or ""."""
    if (why := missing()) or INTERPRETED:
        return why
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return f"FP8 products need compute capability 9.0, this GPU has {major}.{minor}"
    return "" if hasattr(F, "scaled_mm") else "this PyTorch has no torch.nn.functional.scaled_mm"


def pack(matrix: QuantizedMatrix) -> Packed:
    """Return the weight packed in the layout that `run` reads. See `quire.kernels.linear`."""
    (n, k), block = matrix.shape, matrix.scheme.block[0] if matrix.scheme.kind == "fp8 block" else 0
    if n % 64 or matrix.order is not None or block not in (0, 1, GROUP):
        return matrix
    values = matrix.values.contiguous()
    if missing_columns := -k % GROUP:
        values = F.pad(values.view(torch.uint8), (0, missing_columns)).view(values.dtype)
    scales = matrix.scale.float().contiguous() if block else matrix.scale.float().flatten()
    wide = scales.view(1, -1)
    if block == GROUP:  # rows of a multiple of 4 numbers
        wide = F.pad(scales, (0, -scales.shape[1] % 4))
    elif block:
        wide = scales.t().contiguous()
    fixed = None if matrix.input_scale is None else matrix.input_scale.float().view(1)
    counters = torch.zeros(-(-n // 64), dtype=torch.int32, device=scales.device)
    return Scaled(
        values, scales, wide, block, RULES[matrix.scheme.inputs], matrix.scheme.ue8m0, fixed, counters, matrix.scheme
    )


def pack_gated(matrix: QuantizedMatrix) -> Packed:
    """Return the weight (rows of gate, then of up) packed for `run_gated`. See `quire.kernels.linear`."""
    (n, _k), block = matrix.shape, matrix.scheme.block[0]
    return matrix if n % 256 and block == GROUP or n % 128 else pack(matrix)


def way(x: Tensor, packed: Packed) -> str:
    """Return where `run` dequantizes the weight and quantizes x. See `quire.kernels.linear`."""
    if isinstance(packed, QuantizedMatrix):
        return quantized_ref.way(x, packed)
    if len(x) <= FEW_ROWS:
        return product_words(packed.scheme, "stays packed, widened in registers", "in the kernel of the product")
    if len(x) <= scaled_some.MOST_ROWS:
        by = "Triton's tensor cores" if triton_runtime.missing_hopper() else "Gluon's tensor cores"
    else:
        by = "Triton's tensor cores" if packed.most == 127 else "cuBLASLt"
    return product_words(packed.scheme, f"stays packed, multiplied in 8 bits by {by}", "by a kernel before")


def run(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. See `quire.kernels.linear`."""
    return _product(x, packed, bias)


def run_float(x: Tensor, packed: Packed, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in float32. See `quire.kernels.linear`."""
    if isinstance(packed, QuantizedMatrix):
        y = quantized_ref.run_float(x, packed, bias)
    else:
        y = _product(x, packed, bias, dtype=torch.float32)
    return y if out is None else out.copy_(y)


def run_add(x: Tensor, packed: Packed, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x @ weight.T + bias, which overwrites `residual`. See `quire.kernels.linear`."""
    return _product(x, packed, bias, residual=residual)


def run_gated(x: Tensor, packed: Packed, bias: Tensor | None, act: str = "silu") -> Tensor:
    """Return the activation of (gate, up) = x @ weight.T + bias. See `quire.kernels.linear`."""
    return _product(x, packed, bias, act=checked(act))


def run_norm(x: Tensor, weight: Tensor, eps: float, packed: Packed, bias: Tensor | None) -> Tensor:
    """Apply an RMS norm with `weight` and `eps` to x; return `run` of the result. See `quire.kernels.linear`."""
    return _product(x, packed, bias, norm=weight, eps=eps)


def run_norm_gated(
    x: Tensor, weight: Tensor, eps: float, packed: Packed, bias: Tensor | None, act: str = "silu"
) -> Tensor:
    """Apply an RMS norm with `weight` and `eps` to x; return `run_gated` of the result. See `quire.kernels.linear`."""
    return _product(x, packed, bias, norm=weight, eps=eps, act=checked(act))


def _product(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    act: str = "",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Norm, quantization, product, activation and residual, as far as given. Arguments as in `gemv.product`."""
    if isinstance(packed, QuantizedMatrix):
        return _reference(x, packed, bias, residual, norm, eps, act)
    rows, n = x.shape[0], packed.values.shape[0] >> (act != "")
    if x.shape[1] < packed.values.shape[1]:
        if norm is not None:
            x, norm = rms_norm(x, norm, eps), None
        x = F.pad(x, (0, packed.values.shape[1] - x.shape[1]))
    y = x.new_empty(rows, n, dtype=dtype or x.dtype)
    if residual is not None:
        y = residual = residual.contiguous()
    if not rows:
        return y
    into = Epilogue(y, bias, act, residual)
    if rows <= FEW_ROWS:
        if (one := one_row.scaled(x, packed, into, None if norm is None else (norm, eps))) is not None:
            return one
        return scaled_few.product(x, packed, into, norm=norm, eps=eps)
    q, scales = quantize(
        x, packed.rule, packed.values.dtype, scale=packed.fixed, powers=packed.powers, norm=norm, eps=eps
    )
    if rows <= scaled_some.MOST_ROWS:
        by = scaled_some if triton_runtime.missing_hopper() else scaled_hopper
        return by.product(q, scales, packed, into)
    if packed.values.dtype == torch.int8:
        return scaled_many.product(q, scales, packed, into)
    wide = _cublas(q, scales, packed, torch.float32 if dtype == torch.float32 else x.dtype)[:rows]
    if bias is not None:
        wide += bias
    if act:
        return gated(wide, act)
    return wide if residual is None else torch.add(residual, wide, out=y)


def _cublas(q: Tensor, scales: Tensor, packed: Scaled, dtype: torch.dtype) -> Tensor:
    """Multiply all rows of q [R, K], R a multiple of 4, with the weight -> [R, N].

    In Triton's interpreter, where there is no cuBLASLt, in float32.
    """
    if INTERPRETED:
        x = q.float() * (scales.t().repeat_interleave(GROUP, 1) if packed.block else scales.view(-1, 1))
        high = packed.scales.repeat_interleave(packed.block, 0)[: len(packed.values)] if packed.block else packed.scales
        weight = packed.values.float() * (high.repeat_interleave(GROUP, 1) if packed.block else high.view(-1, 1))
        return (x @ weight.t()).to(dtype)
    kinds = F.ScalingType
    if packed.block:
        recipe = kinds.BlockWise128x128 if packed.block == GROUP else kinds.BlockWise1x128
        given, theirs, mine = scales.t(), packed.wide.t(), kinds.BlockWise1x128
    else:
        recipe = mine = kinds.RowWise
        theirs = packed.wide
        given = scales.view(-1, 1) if packed.fixed is None else scales.expand(len(q)).contiguous().view(-1, 1)
    y: Tensor = F.scaled_mm(q, packed.values.t(), given, mine, theirs, recipe, output_dtype=dtype)
    return y


def _reference(
    x: Tensor,
    packed: QuantizedMatrix,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float,
    act: str,
) -> Tensor:
    y = quantized_ref.run(x if norm is None else rms_norm(x, norm, eps), packed, bias)
    if act:
        y = gated(y, act)
    return y if residual is None else residual + y
