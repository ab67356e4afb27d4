"""Tensors in files of `torch.save`, read without torch and without unpickling: nothing in a file is run.

Such a file is a ZIP archive. `data.pkl` says how to make the tensor, and `data/0` holds its numbers. Only the one
program that `torch.save` writes for a single tensor is accepted, word by word.
"""

import base64
import io
import pickletools
import sys
import zipfile
from typing import Any

import numpy as np

from quire.contracts.errors import InvalidParameter
from quire.contracts.step import F32

KINDS = {"torch FloatStorage": "<f4", "torch HalfStorage": "<f2", "torch BFloat16Storage": "<u2"}
MAX_PROGRAM = 4096  # bytes of data.pkl; those of a tensor have some 300
SKIPPED = {"PROTO", "FRAME", "BINPUT", "LONG_BINPUT", "MEMOIZE", "MARK"}
BEFORE = ["GLOBAL", "BINUNICODE", "GLOBAL", "BINUNICODE", "BINUNICODE", "NUMBER", "TUPLE", "BINPERSID", "NUMBER"]
SHAPES = [*["NUMBER"] * 2, "TUPLE2"] * 2
AFTER = ["BOOLEAN", "GLOBAL", "EMPTY_TUPLE", "REDUCE", "TUPLE", "REDUCE", "STOP"]
NAMES = {"BININT": "NUMBER", "BININT1": "NUMBER", "BININT2": "NUMBER", "NEWTRUE": "BOOLEAN", "NEWFALSE": "BOOLEAN"}


def read_matrix(text: str, param: str, *, width: int, most: int) -> F32:
    """Return a matrix [rows, width] that torch.save wrote, as float32. Its type is float32, float16 or bfloat16.

    text    base64 of the file
    param   field of the request, for errors
    most    most rows
    Raises `InvalidParameter` for a file of another kind, size or shape.
    """
    try:
        data = base64.b64decode(text, validate=True)
        kind, count, offset, rows, columns, *strides = _described(data)
        if columns != width or not 0 < rows <= most:
            raise InvalidParameter(
                f"{param}: the tensor is [{rows}, {columns}]: send [tokens, {width}], with at most {most} tokens.",
                param=param,
            )
        last = offset + (rows - 1) * strides[0] + (columns - 1) * strides[1]
        raw = np.frombuffer(_stored(data, "data/0", count * np.dtype(KINDS[kind]).itemsize), KINDS[kind])
        if len(raw) != count or not 0 <= last < count or min(offset, *strides) < 0:
            raise ValueError("numbers are missing")
    except InvalidParameter:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise InvalidParameter(
            f"{param} is not a tensor of torch.save ({error}): send "
            "base64 of torch.save(tensor.detach().cpu(), file), with a tensor [tokens, hidden] in float32, float16 or "
            "bfloat16.",
            param=param,
        ) from None
    view = np.lib.stride_tricks.as_strided(
        raw[offset:], (rows, columns), tuple(stride * raw.itemsize for stride in strides), writeable=False
    )
    return _finite(_as_float32(view), param)


def checked_matrix(matrix: Any, param: str) -> F32:
    """Return a tensor of torch or an array [rows, columns] as float32. Raises `InvalidParameter` for anything else."""
    if type(matrix).__module__.partition(".")[0] == "torch" and hasattr(matrix, "is_floating_point"):
        if not matrix.is_floating_point():
            raise InvalidParameter(f"{param} must hold floats, not {matrix.dtype}.", param=param)
        matrix = matrix.detach().float().cpu().numpy()
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or matrix.dtype.kind != "f" or not matrix.size:
        raise InvalidParameter(f"{param} must be a tensor [tokens, hidden] of floats.", param=param)
    return _finite(np.ascontiguousarray(matrix, np.float32), param)


def _described(data: bytes) -> tuple[Any, ...]:
    """Return the kind of numbers, their count, the offset of the first, rows, columns, and two strides."""
    program = _stored(data, "data.pkl", MAX_PROGRAM)
    read = [(NAMES.get(code.name, code.name), value) for code, value, _ in pickletools.genops(program)]
    read = [(name, value) for name, value in read if name not in SKIPPED]
    values = [value for _, value in read]
    if (
        [name for name, _ in read] != [*BEFORE, *SHAPES, *AFTER]
        or [values[0], values[1], values[3]] != ["torch._utils _rebuild_tensor_v2", "storage", "0"]
        or values[2] not in KINDS
    ):
        raise ValueError("not a single matrix in float32, float16 or bfloat16")
    if _stored(data, "byteorder", 8) != sys.byteorder.encode():
        raise ValueError("its numbers have another order of bytes")
    at = len(BEFORE)
    return values[2], values[5], values[8], values[at], values[at + 1], values[at + 3], values[at + 4]


def _stored(data: bytes, name: str, most: int) -> bytes:
    """Return a file of the archive that is not compressed and has at most `most` bytes."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (found,) = [one for one in archive.infolist() if one.filename.partition("/")[2] == name]
        if found.compress_type != zipfile.ZIP_STORED or found.file_size > most:
            raise ValueError(f"{name} is compressed, or larger than it should be")
        return archive.read(found)


def _as_float32(view: np.ndarray[Any, Any]) -> F32:
    if view.dtype == np.uint16:  # bfloat16: the upper half of a float32
        return (view.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(view, np.float32)


def _finite(matrix: F32, param: str) -> F32:
    if not np.isfinite(matrix).all():
        raise InvalidParameter(f"{param} holds numbers that are not finite: send others.", param=param)
    return matrix
