"""Parameters of a rank before memory is allocated: names, shapes, and the slices of stored tensors that fill them.

No torch. `models/layout.py` computes them, the loaders fill them, layers take their sizes from them.
"""

from typing import NamedTuple

import msgspec

from quire.contracts.scheme import Scheme


class Part(msgspec.Struct, frozen=True):
    """A slice of a stored tensor. It fills rows of a parameter, after the rows of the parts before it.

    stored   name in the checkpoint;  shape  of the whole stored tensor
    start, count   of the slice, along `axis`: rows (0) or columns (1)
    order    row order that the kernels need: in each run of len(order) rows of the slice, row i of the parameter is
             row order[i] of the run. () keeps the stored order
    name     part of the parameter that the slice fills: "q" of a fused parameter, "3.gate" of expert 3; "": all
    """

    stored: str
    shape: tuple[int, ...]
    start: int
    count: int
    axis: int = 0
    order: tuple[int, ...] = ()
    name: str = ""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return (*self.shape[: self.axis], self.count, *self.shape[self.axis + 1 :])

    @property
    def rows(self) -> int:
        """Rows of the parameter that the slice fills."""
        return self.shape[0] if self.axis else self.count

    @property
    def whole(self) -> bool:
        """True when the slice is the whole stored tensor."""
        return self.count == self.shape[self.axis]


class Param(msgspec.Struct, frozen=True):
    """A parameter of a rank; `shape` is the rank's slice of it.

    dtype   "float32" when the parameter stays float32 for every dtype of the model, else ""
    format  of the stored weights, a name of `quire.quantization.formats.FORMATS`
    stored  scheme in which the checkpoint stores the matrix; None: unquantized
    scheme  scheme of the matrix that kernels pack. None: the matrix has the model's dtype; the loader dequantizes a
            quantized one
    shard   how tensor parallelism cuts the parameter: "rows" or "columns" of the matrix; "experts" (whole experts per
            rank, or a slice of each); "" (every rank has the whole parameter)
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    dtype: str = ""
    shard: str = ""
    format: str = "unquantized"
    stored: Scheme | None = None
    scheme: Scheme | None = None

    @property
    def module(self) -> str:
        """Name of the layer that owns the parameter."""
        return self.name.rpartition(".")[0]


FLOATS = ("F32", "BF16", "F16", "F64")  # types of stored numbers, in safetensors' spelling


class RawTensor(NamedTuple):
    """A tensor that a loader fills from the checkpoint, before conversion and packing.

    name       name within the layer;  shape  on this rank;  parts  slices of the checkpoint that fill the tensor
    dtype      of the tensor; "": the model's
    readable   dtypes of stored tensors that the loader accepts
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    dtype: str
    readable: tuple[str, ...] = FLOATS


def of_expert(param: Param, place: int, count: int) -> Param:
    """Return the parameter of one expert: number `place` of the `count` experts that `param` stacks."""
    if count == 1:
        return param
    each = len(param.parts) // count
    shape, parts = (param.shape[0] // count, *param.shape[1:]), param.parts[place * each : (place + 1) * each]
    return msgspec.structs.replace(param, shape=shape, parts=parts)


def fused(param: Param) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Return the number of experts that the parameter stacks (1 if none), and an expert's parts as (name, rows)."""
    stem = param.parts[0].name.rpartition(".")[0]
    own = [part for part in param.parts if part.name.rpartition(".")[0] == stem]
    return len(param.parts) // len(own), tuple((part.name.rpartition(".")[2], part.rows) for part in own)
