"""Linears in float32 arithmetic whose weights stay in their stored type: panels.c has the C code.

A weight of bfloat16 takes half the memory and half the time to read of the same numbers in float32. It is widened in
registers, so results have the accuracy of float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.native import memory
from quire.kernels.native.library import loaded

STEP = 4  # inputs: see panels.c
KINDS = {torch.float32: 0, torch.bfloat16: 1}
PLAIN, AS_FLOAT, GATED = range(3)  # out of quire_linear_panels
TYPES = (torch.float32, torch.bfloat16)  # of activations


@dataclass(frozen=True)
class Packed:
    """A weight [cols, inner] in panels of columns, in its stored type. `gated`: columns of gate, then those of up."""

    data: Tensor
    dtype: torch.dtype
    cols: int
    inner: int
    gated: bool

    @property
    def padded(self) -> int:
        """Inputs with those that fill the last step."""
        return -(-self.inner // STEP) * STEP

    def to_dense(self) -> Tensor:
        """Return the weight, [cols, inner]; the inverse of packing."""
        lanes = loaded().quire_lanes()
        pairs = (lanes, 2) if self.dtype == torch.bfloat16 else (2, lanes)  # see panels.c
        panels = self.data.view(-1, self.padded, *pairs)
        panels = panels.transpose(2, 3) if self.dtype == torch.bfloat16 else panels
        order = panels.permute(2, 0, 3, 1) if self.gated else panels.permute(0, 2, 3, 1)[None]
        halves = order.flatten(1, -2)[:, : self.cols // len(order), : self.inner]
        return halves.flatten(0, 1).contiguous()


def pack(weight: Tensor) -> Packed:
    """See `quire.kernels.linear`."""
    return _pack(weight, False)


def pack_gated(weight: Tensor) -> Packed:
    """See `quire.kernels.linear`."""
    return _pack(weight, True)


def run(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """See `quire.kernels.linear`."""
    return _run(x, packed, bias, PLAIN)


def run_float(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """See `quire.kernels.linear`."""
    return _run(x, packed, bias, AS_FLOAT)


def run_add(x: Tensor, packed: Packed, bias: Tensor | None, residual: Tensor) -> Tensor:
    """See `quire.kernels.linear`."""
    return _run(x, packed, bias, PLAIN, residual.contiguous())


def run_gated(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """See `quire.kernels.linear`."""
    return _run(x, packed, bias, GATED)


def rows(packed: Packed, ids: Tensor) -> Tensor:
    """See `quire.kernels.linear`. Rows are float32, the type of the arithmetic."""
    if packed.gated or ids.dtype != torch.int64 or ids.dim() != 1 or not ids.is_cpu:
        raise ValueError(f"panels linear: rows {ids.dtype} {tuple(ids.shape)} on {ids.device}, gated: {packed.gated}")
    ids = ids.contiguous()
    y = torch.empty((ids.shape[0], packed.inner), dtype=torch.float32)
    loaded().quire_linear_unpack_rows(
        packed.data.data_ptr(), ids.data_ptr(), y.data_ptr(), ids.shape[0], packed.cols, packed.inner, packed.padded,
        KINDS[packed.dtype], 0, torch.get_num_threads(),
    )  # fmt: skip
    return y


def empty(count: int, weight: Tensor, gated: bool) -> list[Packed]:
    """Allocate `count` packed weights like `weight` in one piece of memory: a huge page can hold several of them."""
    cols, inner = weight.shape
    width = 2 * loaded().quire_lanes()
    panels = -(-cols // 2 // (width // 2)) if gated else -(-cols // width)
    data = memory.empty((count, panels * width * -(-inner // STEP) * STEP), weight.dtype)
    return [Packed(own, weight.dtype, cols, inner, gated) for own in data]


def pack_into(packed: Packed, weight: Tensor) -> None:
    """Pack `weight` into the memory of `packed`."""
    cols, inner = weight.shape
    if weight.dtype not in KINDS or not weight.is_cpu or packed.gated and cols % 2:
        raise ValueError(f"panels linear: weight {weight.dtype} {tuple(weight.shape)} on {weight.device}")
    weight = weight.detach().contiguous()
    loaded().quire_linear_pack(
        weight.data_ptr(), packed.data.data_ptr(), cols, inner, packed.padded, KINDS[weight.dtype], int(packed.gated),
        torch.get_num_threads(),
    )  # fmt: skip


def _pack(weight: Tensor, gated: bool) -> Packed:
    (packed,) = empty(1, weight, gated)
    pack_into(packed, weight)
    return packed


def _run(x: Tensor, packed: Packed, bias: Tensor | None, out: int, residual: Tensor | None = None) -> Tensor:
    num_rows, inner = x.shape
    cols = packed.cols // 2 if packed.gated else packed.cols
    if x.dtype not in TYPES or inner != packed.inner or not x.is_cpu:
        raise ValueError(f"panels linear: x {x.dtype} {tuple(x.shape)} on {x.device} for {packed.inner} inputs")
    if packed.gated != (out == GATED):
        raise ValueError(f"panels linear: packed for {'run_gated, not for run' if packed.gated else 'run'}")
    if bias is not None and not _fits(bias, x.dtype, (packed.cols,)):
        raise ValueError(f"panels linear: bias {bias.dtype} {tuple(bias.shape)} for {packed.cols} outputs")
    if residual is not None and not _fits(residual, x.dtype, (num_rows, cols)):
        raise ValueError(f"panels linear: residual {residual.dtype} {tuple(residual.shape)} for {(num_rows, cols)}")
    y = x.new_empty((num_rows, cols), dtype=torch.float32 if out == AS_FLOAT else x.dtype)
    rows = _rows(x, packed)
    loaded().quire_linear_panels(
        rows.data_ptr(), None, packed.data.data_ptr(), None, None, None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(), y.data_ptr(), num_rows, cols, packed.padded, 0, 0,
        KINDS[packed.dtype], out, x.dtype == torch.bfloat16, 0, torch.get_num_threads(),
    )  # fmt: skip
    return y


def _rows(x: Tensor, packed: Packed) -> Tensor:
    """Return x in blocks of rows; a single row is such a block already."""
    num_rows, inner = x.shape
    if num_rows == 1 and x.dtype == torch.float32 and inner == packed.padded and x.stride(1) == 1:
        return x
    if x.stride(1) != 1:
        x = x.contiguous()
    blocks = x.new_empty((num_rows * packed.padded,), dtype=torch.float32)
    loaded().quire_linear_rows(
        x.data_ptr(), blocks.data_ptr(), None, None, None, num_rows, inner, packed.padded, x.stride(0), 0,
        x.dtype == torch.bfloat16, 0, torch.get_num_threads(), 0.0,
    )  # fmt: skip
    return blocks


def _fits(added: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return added.dtype == dtype and added.shape == shape and added.is_cpu and added.is_contiguous()
