"""Encoding of messages between processes: plans, outputs and requests in msgpack, arrays as they are in memory.

No pickle: bytes from a socket can only become the records of `contracts`. An array is a msgpack extension of type ARRAY
with this data, all little-endian:

    byte 0         index of the element type in ELEMENT_TYPES
    byte 1         number of dimensions n
    4 n bytes      uint32 lengths
    the rest       elements, C order

Knows nothing of sockets and processes.
"""

import functools
import math
import struct
import sys
from typing import Any, Generic, TypeVar, get_args

import msgspec
import numpy as np

from quire.procs.messages import FromCore, ToCore

ARRAY = 1  # msgpack extension type
ELEMENT_TYPES = tuple(map(np.dtype, ("int32", "float32", "uint8")))
_INDEX = {dtype: index for index, dtype in enumerate(ELEMENT_TYPES)}

D = TypeVar("D")


def _to_extension(value: object) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray) or value.dtype not in _INDEX:
        raise TypeError(
            f"{type(value).__name__} cannot be sent to another process: use records, plain values, or "
            "arrays of int32, float32 or uint8"
        )
    header = struct.pack(f"<BB{value.ndim}I", _INDEX[value.dtype], value.ndim, *value.shape)
    return msgspec.msgpack.Ext(ARRAY, header + value.tobytes())


def _from_extension(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    size = len(data)
    start = 2 + 4 * data[1] if size >= 2 else 2
    if code != ARRAY or size < start or data[0] >= len(ELEMENT_TYPES):
        raise msgspec.DecodeError(f"extension {code} of {size} bytes is not an array")
    dtype, shape = ELEMENT_TYPES[data[0]], struct.unpack_from(f"<{data[1]}I", data, 2)
    if size - start != math.prod(shape) * dtype.itemsize:
        raise msgspec.DecodeError(f"an array of shape {shape} does not have {size - start} bytes")
    array = np.frombuffer(bytearray(data[start:]), dtype)  # a copy: writable, and the message can be freed
    return array if len(shape) == 1 else array.reshape(shape)


@functools.cache  # one entry for each of the few array types of the records
def _element_type(kind: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(get_args(get_args(kind)[1])[0])
    return dtype


def _check_array(kind: Any, value: object) -> object:
    """Accept only arrays of the right element type. msgspec calls this for every field of a type unknown to it."""
    wanted = _element_type(kind)
    if not isinstance(value, np.ndarray) or value.dtype != wanted:
        raise msgspec.ValidationError(f"expected an array of {wanted}")
    return value


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_extension)


def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_check_array, ext_hook=_from_extension)


def encode(message: msgspec.Struct) -> bytes:
    """Return the message or record as msgpack bytes."""
    assert sys.byteorder == "little", "arrays travel little-endian"
    return _ENCODER.encode(message)


class Messages(Generic[D]):
    """The messages of one direction, as `encode` writes them. Their arrays own their memory."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[D] = _decoder(kind)

    def decode(self, data: bytes | memoryview) -> D:
        """Return the message in `data`. Raises `msgspec.DecodeError` when the bytes hold anything else."""
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError:
            raise
        except (ValueError, OverflowError, RecursionError, MemoryError) as error:  # wrong text, shape, depth, length
            raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from error


TO_CORE = Messages[ToCore](ToCore)
FROM_CORE = Messages[FromCore](FromCore)
