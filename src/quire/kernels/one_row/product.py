"""Products of one row by a kernel in CUDA C++: with a weight of 8 or 4 bits, or with those of the row's experts.

`product.cu` says how. The order of sums depends on the shapes, the tiling and the number of multiprocessors. Floor: the
bytes of the weights over 4.3 TB/s.
"""

from __future__ import annotations

import functools
from ctypes import Structure, c_float, c_int, c_longlong, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention.triton_plan import multiprocessors, shared_memory
from quire.kernels.cuda_source import CudaKernel, CudaSource, runs_on_hopper

SOURCE = Path(__file__).with_name("product.cu")
ENABLED = True
MOST_PICKS = 16
BESIDE = 256  # bytes of shared memory for the row's experts, and for sums of squares
LEAST_BUSY = 0.9  # with fewer multiprocessors that have a unit, kernels with smaller pieces are faster


class Tiling(NamedTuple):
    """The tiling of the kernel: warps of a block, and steps whose weights a warp has in registers."""

    warps: int
    ahead: int


WARPS = 16


class Form(NamedTuple):
    """The macros of the source but for the tiling: a kernel's work.

    bits     of a weight: 8 (FP8 in blocks of 128 x 128) or 4 (`weight_only.words`, in groups of 128)
    inputs   of a matrix
    picks    experts of the row; 0: one matrix
    down     True: the results of experts are added, with a row for each
    powers   True: scales of the row are powers of two
    wide     True: the result is float32
    zeros    True: numbers of 4 bits have zero points
    """

    bits: int
    inputs: int
    gated: bool = False
    norm: bool = False
    picks: int = 0
    down: bool = False
    powers: bool = False
    wide: bool = False
    zeros: bool = False


class Weight(NamedTuple):
    """A weight in the layout of the kernel.

    values, scales, zeros   FP8: [experts, N, K] or [N, K], and scales by blocks; 4 bits: `weight_only.words.product`
    outputs                 of a matrix (of gate)
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    outputs: int


class _Args(Structure):
    """`Args` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "norm", "weight", "scales", "zeros", "residual", "y", "ids", "weights")),
        *((name, c_longlong) for name in ("matrix", "matrix_scales")),
        *((name, c_int) for name in ("n", "units", "own")),
        ("eps", c_float),
    )


def takes(form: Form, x: Tensor, weight: Weight, act: str, *others: Tensor | None) -> bool:
    """Return True if the kernel takes the row x: in bfloat16, as the others are, on a GPU that runs it.

    act   activation of a weight with gate and up; "": it has no gate
    """
    if len(x) != 1 or act not in ("", "silu") or x.shape[1] % 128:
        return False
    if not ENABLED or x.stride(1) != 1 or not runs_on_hopper(x.device):
        return False
    typed = all(one is None or (one.dtype, one.data_ptr() % 8) == (torch.bfloat16, 0) for one in (x, *others))
    each, units = 16 >> form.gated, units_of(form, weight)
    busy, own = units >= LEAST_BUSY * multiprocessors(), -(-units // multiprocessors())
    return typed and busy and weight.outputs % each == 0 and shared_bytes(form, tiling_of(form), own) <= shared_memory()


def multiply(
    form: Form,
    x: Tensor,
    weight: Weight,
    y: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    chosen: tuple[Tensor, Tensor] | None = None,
    overlaps: bool = True,
) -> Tensor:
    """Multiply the row x with the weight, write the result to y, and return y.

    norm       weight [K] and eps of an RMS norm of x; None: no norm
    residual   [1, N], added; may be y
    chosen     ids int32 and weights float32 of the row's experts
    overlaps   False: the kernel starts after the end of the one before it
    """
    units, tiling = units_of(form, weight), tiling_of(form)
    own = -(-units // multiprocessors())
    ids, weights = chosen or (None, None)
    factors, eps = norm or (None, 0.0)
    values, scales, zeros, outputs = weight
    tensors = x, factors, values, scales, zeros, residual, y, ids, weights
    args = _Args(
        *(None if one is None else one.data_ptr() for one in tensors),
        *(values.stride(0) * values.element_size(), scales.stride(0), outputs, units, own, eps),
    )
    kernel_of(form, tiling).launch(
        (-(-units // own),),
        (tiling.warps * 32,),
        [args],
        shared_bytes=shared_bytes(form, tiling, own),
        pdl=overlaps and pdl.in_use(),
    )
    return y


def units_of(form: Form, weight: Weight) -> int:
    """Return the units of all outputs: of 16, of a weight with gate and up of 8."""
    return weight.outputs // (16 >> form.gated) * (form.picks if form.picks and not form.down else 1)


def tiling_of(form: Form) -> Tiling:
    """Return the tiling of a form. What a warp has of a long row takes registers from its weights."""
    return Tiling(WARPS, 4 if form.bits == 8 and turns_of(form, WARPS) < 12 else 3)


def turns_of(form: Form, warps: int) -> int:
    """Return how many groups of 128 inputs a warp has of the row, and of a norm's weight."""
    return -(-form.inputs * (form.picks if form.down else 1) // (128 * warps)) * (1 + form.norm)


def shared_bytes(form: Form, tiling: Tiling, own: int) -> int:
    """Return the dynamic shared memory of a block that has `own` units: row, scales, experts, and sums of warps."""
    inputs = form.inputs * (form.picks if form.down else 1)
    of_steps = inputs // 128 * (4 if form.bits == 8 else 8)
    return inputs * 2 + -(-of_steps // 16) * 16 + BESIDE + own * tiling.warps * 64


@functools.cache
def kernel_of(form: Form, tiling: Tiling) -> CudaKernel:
    """Return the kernel of a form and a tiling."""
    names = ("FORMAT", "K", "GATED", "NORM", "PICKS", "DOWN", "POWERS", "FLOAT", "ZEROS")
    defines = dict(zip(names, map(int, form), strict=True))
    registers = 128 if turns_of(form, tiling.warps) > 6 else 112 if form.bits == 8 else 96
    defines |= {"WARPS": tiling.warps, "AHEAD": tiling.ahead, "REGISTERS": registers}
    return CudaSource(SOURCE, defines).kernel("one_row")
