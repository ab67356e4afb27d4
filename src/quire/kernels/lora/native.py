"""Products of adapters in C, row by row; native.c has the code. A recorded step reads the slots of its rows anew."""

import torch
from torch import Tensor

from quire.kernels.lora import AdapterRows, AdapterWeights, ref
from quire.kernels.lora.ref import fuses as fuses
from quire.kernels.lora.ref import prepare as prepare
from quire.kernels.native.library import loaded

TYPES = (torch.float32, torch.bfloat16)
OUTPUTS = 128  # of a task


def shrink(x: Tensor, weights: AdapterWeights, rows: AdapterRows, first: int = 0) -> Tensor | ref.Inner:
    """Return the products A x, [T, modules, R] float32; matrices with other strides are multiplied by `ref`."""
    modules, rank, width = weights.a.shape[1:]
    if x.stride(-1) != 1:
        x = x.contiguous()
    if not (weights.a.stride(3) == weights.b.stride(2) == weights.ranks.stride(0) == 1) or x.dtype not in TYPES:
        return ref.shrink(x, weights, rows, first)
    _check(x, weights, rows, first)
    inner = torch.empty((len(x), modules, rank), dtype=torch.float32)
    loaded().quire_lora_shrink(
        x.data_ptr(),
        weights.a.data_ptr(),
        rows.slots[first:].data_ptr(),
        weights.ranks.data_ptr(),
        inner.data_ptr(),
        len(x),
        width,
        modules,
        rank,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        *weights.a.stride()[:3],
        x.dtype == torch.bfloat16,
        weights.a.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return inner


def expand(y: Tensor, inner: Tensor | ref.Inner, weights: AdapterWeights, rows: AdapterRows, first: int = 0) -> None:
    """Add the products B of inner to y in place. See `quire.kernels.lora`."""
    if isinstance(inner, list):
        ref.expand(y, inner, weights, rows, first)
        return
    _check(y, weights, rows, first)
    if y.stride(-1) != 1 or y.shape[1] < max(run.first + run.rows for run in weights.runs):
        raise ValueError(f"native lora: y must have all outputs and stride 1; it is {tuple(y.shape)}, {y.stride()}")
    blocks = weights.blocks(OUTPUTS, y.device)
    loaded().quire_lora_expand(
        y.data_ptr(),
        inner.data_ptr(),
        weights.b.data_ptr(),
        rows.slots[first:].data_ptr(),
        weights.ranks.data_ptr(),
        blocks.data_ptr(),
        len(blocks),
        len(y),
        inner.shape[1],
        inner.shape[2],
        y.stride(0),
        *weights.b.stride()[:2],
        y.dtype == torch.bfloat16,
        weights.b.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def _check(x: Tensor, weights: AdapterWeights, rows: AdapterRows, first: int) -> None:
    """Raise ValueError for what the C code would read or write wrongly."""
    types = {x.dtype, weights.a.dtype, weights.b.dtype} <= {*TYPES} and weights.a.dtype == weights.b.dtype
    words = weights.ranks.dtype == rows.slots.dtype == torch.int32 and rows.slots.is_contiguous()
    if not (types and words and x.is_cpu and weights.a.is_cpu and 0 <= first <= len(rows.slots) - len(x)):
        raise ValueError(
            f"native lora: rows {first} to {first + len(x)} of {len(rows.slots)} need float32 or bfloat16 on the CPU, "
            f"and int32 slots and ranks; they are {x.dtype} on {x.device}, matrices {weights.a.dtype}"
        )
