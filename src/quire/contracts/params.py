"""Parameters of a rank before memory is allocated: names, shapes, and the slices of stored tensors that fill them.

No torch. `plan/layout.py` computes them, the loaders fill them, layers take their sizes from them.
"""

from itertools import takewhile
from typing import NamedTuple

import msgspec

from quire.contracts.scheme import Scheme

MOST_READS = 16  # states of a model that an EAGLE-3 head reads: each may have a norm with weights of its own


class Part(msgspec.Struct, frozen=True, gc=False):
    """A slice of a checkpoint tensor. The parts of a parameter fill the parameter's rows one after the other.

    The garbage collector does not track parts: a large model has 45,000 of them, and none can be in a cycle.

    stored   name of the tensor in the checkpoint
    shape    shape of the whole tensor in the checkpoint
    start, count   first index and length of the slice along `axis` of the matrix: rows (0) or columns (1)
    order    order of rows that the kernels need, within each run of len(order) rows of the slice: row i of the
             parameter is row order[i] of the run. (): the checkpoint's order
    name     name of the slice in a fused parameter: "q" of qkv, "3.gate" of expert 3; "": the parameter is not fused
    expert   index along the first axis of a tensor that stacks all experts' matrices or vectors: the slice is of this
             one. -1: the tensor is one matrix or vector
    transposed   True: the checkpoint stores the matrix as [columns, rows]
    paired   True: rows of gate and up alternate in the slice (g0, u0, g1, u1). The parameter has those of gate first

    Example: Part("experts.gate_up_proj", (32, 64, 96), 48, 48, expert=5, transposed=True) reads columns 48 to 96 of
    each of the 64 stored rows of expert 5; they become 48 rows of 64 numbers.
    """

    stored: str
    shape: tuple[int, ...]
    start: int
    count: int
    axis: int = 0
    order: tuple[int, ...] = ()
    name: str = ""
    expert: int = -1
    transposed: bool = False
    paired: bool = False

    @property
    def stored_matrix(self) -> tuple[int, ...]:
        """Shape of the matrix or vector as the checkpoint stores it; of an expert's in a stack, without the others."""
        return self.shape[1:] if self.expert >= 0 else self.shape

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape of the whole matrix or vector of which this is a slice: [rows, columns] as the parameter has them."""
        return self.stored_matrix[::-1] if self.transposed else self.stored_matrix

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice, in the parameter."""
        whole = self.matrix
        return (*whole[: self.axis], self.count, *whole[self.axis + 1 :])

    @property
    def rows(self) -> int:
        """Number of rows of the parameter that the slice fills."""
        return self.matrix[0] if self.axis else self.count

    @property
    def whole(self) -> bool:
        """True when the slice is the whole matrix or vector."""
        return self.count == self.matrix[self.axis]


class Param(msgspec.Struct, frozen=True):
    """A parameter as a rank holds it: `shape` is the shape of the rank's slice.

    parts   slices of checkpoint tensors that fill the parameter
    dtype   "float32": the parameter stays float32 for every dtype of the model; "": it has the model's dtype
    format  format of the checkpoint's weights, a key of `quire.quantization.formats.FORMATS`
    stored  quantization of the matrix in the checkpoint; None: unquantized
    each    of experts whose schemes differ in the checkpoint: the scheme of each; `stored` holds the numbers of all.
            (): all have the scheme `stored`
    scheme  quantization of the matrix that the kernels run. None: the matrix has the model's dtype; the loader
            dequantizes a quantized one
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
    each: tuple[Scheme, ...] = ()
    scheme: Scheme | None = None

    @property
    def module(self) -> str:
        """Name of the layer that owns the parameter."""
        return self.name.rpartition(".")[0]


FLOATS = ("F32", "BF16", "F16", "F64")  # types of stored numbers, in safetensors' spelling


class RawTensor(NamedTuple):
    """A tensor that a loader fills from the checkpoint, before conversion and packing.

    name       name within the layer
    shape      shape on this rank
    parts      slices of the checkpoint that fill the tensor
    dtype      dtype of the tensor; "": the model's
    readable   dtypes that the checkpoint's tensors may have, as safetensors names them ("BF16")
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    dtype: str
    readable: tuple[str, ...] = FLOATS


def of_expert(param: Param, place: int, count: int) -> Param:
    """Return the parameter of expert `place` (from 0) alone. `param` stacks `count` experts."""
    if count == 1 and not param.each:
        return param
    each = len(param.parts) // count
    shape, parts = (param.shape[0] // count, *param.shape[1:]), param.parts[place * each : (place + 1) * each]
    stored = param.each[place] if param.each else param.stored
    return msgspec.structs.replace(param, shape=shape, parts=parts, stored=stored, each=())


def num_experts(param: Param) -> int:
    """Return the number of experts that a parameter stacks; 1 for other parameters."""
    return fused(param)[0] if param.shard == "experts" else 1


def first_expert(param: Param) -> Param:
    """Return the parameter of the first expert of a stack alone; another parameter as it is."""
    return of_expert(param, 0, num_experts(param))


def fused(param: Param) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Return how many experts `param` stacks (1 if none), and (name, number of rows) of each part of an expert."""
    stem = param.parts[0].name.rpartition(".")[0]
    own = tuple(takewhile(lambda part: part.name.rpartition(".")[0] == stem, param.parts))
    return len(param.parts) // len(own), tuple((part.name.rpartition(".")[2], part.rows) for part in own)
