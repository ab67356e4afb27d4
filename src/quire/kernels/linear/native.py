"""bfloat16 linears on AMX tiles; native.c has the C code.

Measured on 2 cores that read 30 GB/s, oneDNN's packed linear -> this, fastest of many, microseconds, 1 | 8 rows:
4096 x 1024: 359 | 346 -> 279 | 297; 1024 x 3072: 262 | 254 -> 217 | 219; 151936 x 1024 (the head): 24,200 | 24,000 ->
11,400 | 11,200, which is 27 GB/s.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import number_of
from quire.kernels.native import memory
from quire.kernels.native.library import loaded

GROUP, STEP = 32, 32  # of native.c: columns, inputs
OUT_BF16, OUT_F32, OUT_GATED = range(3)


@dataclass(frozen=True)
class Packed:
    """A weight of `cols` outputs and `inner` inputs, packed in the order that native.c reads.

    gated   True: packed for `run_gated`; half of the outputs belong to gate, half to up
    """

    data: Tensor
    cols: int
    inner: int
    gated: bool


def pack(weight: Tensor) -> Packed:
    """Return the weight packed in the layout that `run` reads. See `quire.kernels.linear`."""
    return _pack(weight, False)


def pack_gated(weight: Tensor) -> Packed:
    """Return the weight (rows of gate, then of up) packed for `run_gated`. See `quire.kernels.linear`."""
    return _pack(weight, True)


def run(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. See `quire.kernels.linear`."""
    return _run(x, packed, bias, x.new_empty(x.shape[0], packed.cols), OUT_BF16)


def run_float(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias in float32. See `quire.kernels.linear`."""
    return _run(x, packed, bias, x.new_empty((x.shape[0], packed.cols), dtype=torch.float32), OUT_F32)


def run_add(x: Tensor, packed: Packed, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x @ weight.T + bias. See `quire.kernels.linear`."""
    return _run(x, packed, bias, x.new_empty(x.shape[0], packed.cols), OUT_BF16, residual.contiguous())


def run_gated(x: Tensor, packed: Packed, bias: Tensor | None, act: str = "silu") -> Tensor:
    """Return the activation of (gate, up) = x @ weight.T + bias. See `quire.kernels.linear`."""
    if not packed.gated:
        raise ValueError("native linear: the weight was packed by `pack`: call run, or pack it with `pack_gated`")
    return _run(x, packed, bias, x.new_empty(x.shape[0], packed.cols // 2), OUT_GATED, act=number_of(act))


def rows(packed: Packed, ids: Tensor) -> Tensor:
    """Return the rows `ids` of a packed weight (an embedding look-up). See `quire.kernels.linear`."""
    if packed.gated or ids.dtype != torch.int64 or ids.dim() != 1 or not ids.is_cpu:
        raise ValueError(
            f"native linear: `rows` needs ids [n] int64 on the CPU and a weight packed by `pack`; ids are "
            f"{ids.dtype} {tuple(ids.shape)} on {ids.device}, and the weight is packed by "
            f"{'`pack_gated`' if packed.gated else '`pack`'}"
        )
    ids = ids.contiguous()
    y = packed.data.new_empty(ids.shape[0], packed.inner)
    loaded().quire_rows_bf16(
        packed.data.data_ptr(),
        ids.data_ptr(),
        y.data_ptr(),
        ids.shape[0],
        packed.cols,
        packed.inner,
        torch.get_num_threads(),
    )
    return y


def empty(count: int, weight: Tensor, gated: bool) -> list[Packed]:
    """Allocate `count` packed weights, shaped like `weight`, in one piece of memory. A huge page can hold several.

    gated   True: they are packed for `run_gated`
    """
    cols, inner = weight.shape
    data = memory.empty((count, _packed_size(cols, inner, gated)), torch.bfloat16)
    return [Packed(own, cols, inner, gated) for own in data]


def pack_into(packed: Packed, weight: Tensor) -> None:
    """Pack `weight` into the memory of `packed`, an element of `empty`."""
    cols, inner = weight.shape
    if weight.dtype != torch.bfloat16 or not weight.is_cpu or packed.gated and cols % 2:
        raise ValueError(
            f"native linear: the weight must be bfloat16 on the CPU, with an even number of rows if "
            f"gated; it is {weight.dtype} {tuple(weight.shape)} on {weight.device}"
        )
    weight = weight.detach().contiguous()
    loaded().quire_pack_bf16(
        weight.data_ptr(), packed.data.data_ptr(), cols, inner, int(packed.gated), torch.get_num_threads()
    )


def _packed_size(cols: int, inner: int, gated: bool) -> int:
    groups = -(-(cols // 2) // (GROUP // 2)) if gated else -(-cols // GROUP)
    return groups * GROUP * -(-inner // STEP) * STEP


def _pack(weight: Tensor, gated: bool) -> Packed:
    (packed,) = empty(1, weight, gated)
    pack_into(packed, weight)
    return packed


def _run(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    y: Tensor,
    out: int,
    residual: Tensor | None = None,
    act: int = 0,
) -> Tensor:
    num_rows, inner = x.shape
    if x.dtype != torch.bfloat16 or inner != packed.inner or not x.is_cpu:
        raise ValueError(
            f"native linear: x must be bfloat16 [rows, {packed.inner}] on the CPU; it is {x.dtype} "
            f"{tuple(x.shape)} on {x.device}"
        )
    if packed.gated != (out == OUT_GATED):
        raise ValueError("native linear: the weight was packed by `pack_gated`: call run_gated, or pack it with `pack`")
    if bias is not None and not _fits(bias, (packed.cols,)):
        raise ValueError(
            f"native linear: the bias must be {packed.cols} numbers of x's dtype on the CPU; it is "
            f"{bias.dtype} {tuple(bias.shape)}"
        )
    if residual is not None and not _fits(residual, (num_rows, packed.cols)):
        raise ValueError(
            f"native linear: the residual must be bfloat16 {tuple(y.shape)} on the CPU; it is "
            f"{residual.dtype} {tuple(residual.shape)}"
        )
    if inner % STEP:  # a tile reads whole steps, and memory past the end may hold NaN
        x = F.pad(x, (0, -inner % STEP))
    elif x.stride(1) != 1:
        x = x.contiguous()
    loaded().quire_linear_bf16(
        x.data_ptr(),
        packed.data.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        y.data_ptr(),
        num_rows,
        y.shape[1],
        x.shape[1],
        x.stride(0),
        out,
        act,
        torch.get_num_threads(),
    )
    return y


def _fits(added: Tensor, shape: tuple[int, ...]) -> bool:
    return added.dtype == torch.bfloat16 and added.shape == shape and added.is_cpu and added.is_contiguous()
