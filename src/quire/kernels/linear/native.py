"""bfloat16 linears on AMX tiles: the C side is native.c.

Measured on 2 cores that read 30 GB/s, oneDNN's packed linear -> this, fastest of many, microseconds, 1 | 8 rows:
4096 x 1024: 359 | 346 -> 279 | 297; 1024 x 3072: 262 | 254 -> 217 | 219; 151936 x 1024 (the head): 24,200 | 24,000 ->
11,400 | 11,200, which is 27 GB/s.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.native import memory
from quire.kernels.native.library import loaded, missing
from quire.kernels.select import Support

SUPPORT = Support(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({"bfloat16"}),
    features=frozenset({"add", "gated", "rows"}),
    missing=missing("amx_tile", "amx_bf16", "avx512_bf16"),
)
GROUP, STEP = 32, 32  # of native.c: columns, inputs
OUT_BF16, OUT_F32, OUT_GATED = range(3)


@dataclass(frozen=True)
class Packed:
    """A weight [cols, inner] in the order that native.c reads. `gated`: cols are gate's, then up's."""

    data: Tensor
    cols: int
    inner: int
    gated: bool


def pack(weight: Tensor) -> Packed:
    """See `quire.kernels.linear`."""
    return _pack(weight, False)


def pack_gated(weight: Tensor) -> Packed:
    """See `quire.kernels.linear`."""
    return _pack(weight, True)


def run(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """See `quire.kernels.linear`."""
    return _run(x, packed, bias, x.new_empty(x.shape[0], packed.cols), OUT_BF16)


def run_float(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """See `quire.kernels.linear`."""
    return _run(x, packed, bias, x.new_empty((x.shape[0], packed.cols), dtype=torch.float32), OUT_F32)


def run_add(x: Tensor, packed: Packed, bias: Tensor | None, residual: Tensor) -> Tensor:
    """See `quire.kernels.linear`."""
    y = torch.empty(residual.shape, dtype=residual.dtype)
    return _run(x, packed, bias, y, OUT_BF16, residual.contiguous())


def run_gated(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """See `quire.kernels.linear`."""
    assert packed.gated, "packed for run"
    return _run(x, packed, bias, x.new_empty(x.shape[0], packed.cols // 2), OUT_GATED)


def rows(packed: Packed, ids: Tensor) -> Tensor:
    """See `quire.kernels.linear`."""
    assert not packed.gated and ids.dtype == torch.int64
    ids = ids.contiguous()
    y = packed.data.new_empty(ids.shape[0], packed.inner)
    loaded().quire_rows_bf16(
        packed.data.data_ptr(), ids.data_ptr(), y.data_ptr(), ids.shape[0], packed.cols, packed.inner,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def _pack(weight: Tensor, gated: bool) -> Packed:
    cols, inner = weight.shape
    weight = weight.detach().contiguous()
    groups = -(-(cols // 2) // (GROUP // 2)) if gated else -(-cols // GROUP)
    data = memory.empty((groups * GROUP * -(-inner // STEP) * STEP,), torch.bfloat16)
    loaded().quire_pack_bf16(
        weight.data_ptr(), data.data_ptr(), cols, inner, int(gated), torch.get_num_threads()
    )
    return Packed(data, cols, inner, gated)


def _run(
    x: Tensor, packed: Packed, bias: Tensor | None, y: Tensor, out: int, residual: Tensor | None = None
) -> Tensor:
    num_rows, inner = x.shape
    if inner % STEP:  # a tile reads whole steps, and what lies past the end may be NaN
        x = F.pad(x, (0, -inner % STEP))
    elif x.stride(1) != 1:
        x = x.contiguous()
    loaded().quire_linear_bf16(
        x.data_ptr(), packed.data.data_ptr(), None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(), y.data_ptr(),
        num_rows, y.shape[1], x.shape[1], x.stride(0), out,
        torch.get_num_threads(),
    )  # fmt: skip
    return y
