"""`QuantizedMatrix`, the form to which every checkpoint format is converted before a kernel packs it.

N: rows (outputs), K: columns (inputs). E2M1: floating point of 4 bits, with 1 bit for the sign, 2 for the exponent and
1 for the mantissa. E8M0: a power of two, in a byte that has its exponent plus 127.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme

TYPES = {
    "e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
    "w4": torch.uint8,
    "w8": torch.uint8,
    "e2m1": torch.uint8,
}
MIDDLE = {"w4": 8, "w8": 128}  # the zero of symmetric unsigned values
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of the codes 0 to 7; a code from 8 on is negative
NO_POWER = 255  # the code of E8M0 that is NaN
MOST_POWER = 128  # the largest code that kernels take, of the scale 2: see `weight_only.words.repack_powers`


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized weight [N, K]. Its numbers are (values - zero) * scale * factor (`dequantize`).

    values        [N, K] float8_e4m3fn ("e4m3"), int8 ("int8") or uint8 ("w8"); [N, K / 2] uint8 ("w4", "e2m1"), the low
                  nibble is the even column
    scale         float32; of MXFP4 uint8 (E8M0), of NVFP4 float8_e4m3fn: [ceil(N / rows), ceil(K / columns)] for blocks
                  of rows x columns; [N, 1] for channels
    zero          uint8, of the scale's shape; None: 0, or the middle of unsigned values (8 or 128)
    order         int32 [K]: column k of `values` multiplies x[:, order[k]]; None: x[:, k]
    input_scale   float32 scalar, the scale of all activations; None: not stored
    factor        float32 [N, 1], multiplies the scales of a row of NVFP4; None: 1
    """

    scheme: Scheme
    values: Tensor
    scale: Tensor
    zero: Tensor | None = None
    order: Tensor | None = None
    input_scale: Tensor | None = None
    factor: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (N, K) of the weight, also where two values share a byte."""
        return self.values.shape[0], self.values.shape[1] * 8 // self.scheme.bits

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        every = {
            "values": self.values,
            "scale": self.scale,
            "zero": self.zero,
            "order": self.order,
            "input_scale": self.input_scale,
            "factor": self.factor,
        }
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.values.device

    def check(self) -> "QuantizedMatrix":
        """Assert the dtypes and shapes that the class docstring lists, and return the matrix."""
        (rows, columns), scheme = self.shape, self.scheme
        assert self.values.dtype == TYPES[scheme.values], self.values.dtype
        assert self.scale.shape == scheme.scales(rows, columns), (tuple(self.scale.shape), scheme)
        assert self.scale.dtype == scale_dtype(scheme) and scheme.block != (0, 0)
        assert (self.zero is not None) == scheme.zeros and (self.order is not None) == scheme.order
        assert self.zero is None or (self.zero.shape == self.scale.shape and self.zero.dtype == torch.uint8)
        assert self.order is None or (self.order.shape == (columns,) and self.order.dtype == torch.int32)
        assert (self.input_scale is not None) == (scheme.inputs == "tensor")
        assert (self.factor is not None) == scheme.factor
        assert self.factor is None or (self.factor.shape == (rows, 1) and self.factor.dtype == torch.float32)
        return self


def scale_dtype(scheme: Scheme) -> torch.dtype:
    """Return the dtype of the scales of a `QuantizedMatrix`."""
    return {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}.get(scheme.kind, torch.float32)


Room = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]  # allocates memory


def torch_room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor with `torch.empty`."""
    return torch.empty(shape, dtype=dtype, device=device)


def empty(
    scheme: Scheme, shape: tuple[int, int], device: torch.device | str, room: Room = torch_room
) -> QuantizedMatrix:
    """Allocate a matrix of `shape` (N, K) without setting its numbers. The function `room` allocates the values.

    On the device "meta" it has shapes and no memory.
    """
    rows, columns = shape
    scales, width = scheme.scales(rows, columns), columns * scheme.bits // 8
    return QuantizedMatrix(
        scheme,
        room((rows, width), TYPES[scheme.values], torch.device(device)),
        torch.empty(scales, dtype=scale_dtype(scheme), device=device),
        torch.empty(scales, dtype=torch.uint8, device=device) if scheme.zeros else None,
        torch.empty(columns, dtype=torch.int32, device=device) if scheme.order else None,
        torch.empty((), dtype=torch.float32, device=device) if scheme.inputs == "tensor" else None,
        torch.empty((rows, 1), dtype=torch.float32, device=device) if scheme.factor else None,
    ).check()


Weight = Tensor | QuantizedMatrix


def empty_weight(
    scheme: Scheme | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str
) -> Weight:
    """Allocate a weight of `shape` without setting its numbers. Without a scheme, it is a tensor of `dtype`."""
    return torch.empty(shape, dtype=dtype, device=device) if scheme is None else empty(scheme, shape, device)


def dequantize(matrix: QuantizedMatrix, start: int = 0, end: int | None = None) -> Tensor:
    """Return rows `start` to `end` of the weight in float32, [rows, K]; columns stay in the order of `values`.

    `start` must be a multiple of the block's rows.
    """
    rows, columns = matrix.shape
    end = rows if end is None else min(end, rows)
    scale = _spread(matrix, float_scales(matrix), start, end)
    if matrix.scheme.values == "e2m1":
        table = torch.tensor((*E2M1, *(-number for number in E2M1)), device=matrix.device)
        numbers = table[unpacked(matrix, start, end).int()] * scale
        return numbers if matrix.factor is None else numbers * matrix.factor[start:end]
    values = unpacked(matrix, start, end).float()
    zero = _spread(matrix, matrix.zero, start, end) if matrix.zero is not None else MIDDLE.get(matrix.scheme.values, 0)
    return (values - zero) * scale


def float_scales(matrix: QuantizedMatrix) -> Tensor:
    """Return the scales in float32, without `factor`.

    Those of E8M0 are 2^(code - 127), of which float32 holds all; code 255 is NaN.
    """
    scale = matrix.scale
    return scale.view(torch.float8_e8m0fnu).float() if scale.dtype == torch.uint8 else scale.float()


def unpacked(matrix: QuantizedMatrix, start: int = 0, end: int | None = None) -> Tensor:
    """Return rows `start` to `end` of the quantized values, [rows, K]. Each 4-bit value takes a byte of its own."""
    return integers(matrix.values[start:end], matrix.scheme.values)


def integers(values: Tensor, kind: str) -> Tensor:
    """Return stored values one by one, [rows, K]; of 4-bit values two share a byte, the low nibble is the first."""
    return torch.stack((values & 15, values >> 4), -1).flatten(1) if kind in ("w4", "e2m1") else values


def _spread(matrix: QuantizedMatrix, blocks: Tensor, start: int, end: int) -> Tensor:
    """Return a number of each block for each row and column, [rows, K] (or [rows, 1] for channels), in float32."""
    high, wide = matrix.scheme.block
    assert high and start % high == 0, "rows begin with a block"
    spread = blocks[start // high : -(-end // high)].float()
    if high > 1:
        spread = spread.repeat_interleave(high, 0)[: end - start]
    return spread.repeat_interleave(wide, 1)[:, : matrix.shape[1]] if wide else spread


def moved(packed: object, device: torch.device) -> object:
    """Return a packed weight with all its tensors on `device`, also those inside tuples and dataclasses."""
    if isinstance(packed, tuple):
        return tuple(moved(part, device) for part in packed)
    if is_dataclass(packed) and not isinstance(packed, type):
        own = {field.name: getattr(packed, field.name) for field in fields(packed) if field.init}
        parts = {name: moved(part, device) for name, part in own.items()}
        return packed if all(part is own[name] for name, part in parts.items()) else replace(packed, **parts)
    return packed.to(device) if isinstance(packed, Tensor) and packed.device != device else packed


def leaves(packed: object) -> Iterator[Tensor]:
    """Yield the tensors of a packed weight, also those inside lists, tuples and dataclasses, in their order."""
    if isinstance(packed, Tensor):
        yield packed
    elif isinstance(packed, tuple | list):
        for part in packed:
            yield from leaves(part)
    elif is_dataclass(packed):
        for field in fields(packed):
            yield from leaves(getattr(packed, field.name))
