"""Formats that store values in the rows of the matrix: FP8, INT8, and packed integers of compressed-tensors. No torch.

Values of fused parts lie in one tensor; scales stay apart, part by part.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from quire.contracts.params import FLOATS, Param, Part, RawTensor
from quire.contracts.scheme import Scheme
from quire.quantization.slices import Axes, cuts_blocks, group_axis, scale_part, stored_part

TYPES = {"e4m3": ("float8_e4m3fn", "F8_E4M3"), "int8": ("int8", "I8"), "w8": ("int8", "I8")}
WORD = 32  # bits of a packed word


class RowMajor:
    """Format that stores a weight [N, K] row by row (FP8, INT8, pack-quantized). See `WeightFormat` in formats.py.

    blocks   name of the tensor with the scales of blocks or groups; the scale of a whole matrix or of each row is
             always "weight_scale"
    packed   True: several values of `Scheme.bits` bits lie in each int32 word
    spare    names of stored tensors that the loader does not need
    """

    def __init__(
        self, name: str, *, blocks: str = "weight_scale", packed: bool = False, spare: tuple[str, ...] = ()
    ) -> None:
        self.name, self.packed, self._blocks, self._spare = name, packed, blocks, spare

    def tensors(self, param: Param) -> tuple[RawTensor, ...]:
        """Return the values of all parts, then scale, zeros, g_idx and input scale of each. See `WeightFormat`."""
        scheme, own = stored_scheme(param), param.name.rpartition(".")[2]
        (dtype, readable), suffix = ("int32", "I32") if self.packed else TYPES[scheme.values], "weight"
        if self.packed:
            suffix = "weight_packed"
        values = tuple(self._values(part, suffix, scheme) for part in param.parts)
        width = values[0].local_shape[1]
        return (
            RawTensor(f"{own}.values", (param.shape[0], width), values, dtype, (readable,)),
            *(raw for i, part in enumerate(param.parts) for raw in self._beside(part, f"{own}.{i}", scheme)),
        )

    def _values(self, part: Part, suffix: str, scheme: Scheme) -> Part:
        per = WORD // scheme.bits if self.packed else 1
        shape = (part.shape[0], -(-part.shape[1] // per))
        made = stored_part(part, suffix, shape, Axes(0, 1, (1, per)))
        return replace(made, order=part.order)

    def _beside(self, part: Part, own: str, scheme: Scheme) -> Iterator[RawTensor]:
        scale = scale_part(part, self._blocks if scheme.block[1] else "weight_scale", scheme)
        yield RawTensor(f"{own}.scale", scale.local_shape, (scale,), "float32", FLOATS)
        rows, columns = part.shape
        if scheme.zeros:
            per = WORD // scheme.bits
            shape = (-(-rows // per), scheme.scales(rows, columns)[1])
            axes = Axes(0, group_axis(part, scheme, 1), (per, scheme.block[1]))
            zero = stored_part(part, "weight_zero_point", shape, axes)
            yield RawTensor(f"{own}.zero", zero.local_shape, (zero,), "int32", ("I32",))
        if scheme.order:
            order = stored_part(part, "weight_g_idx", (columns,), Axes(None, 0))
            yield RawTensor(f"{own}.order", order.local_shape, (order,), "int32", ("I32", "I64"))
        if scheme.inputs == "tensor":
            given = stored_part(part, "input_scale", (1,), Axes(None, None))
            yield RawTensor(f"{own}.input_scale", (1,), (given,), "float32", FLOATS)

    def spare(self, param: Param) -> Iterator[str]:
        """Yield names of stored tensors that need not be read. See `WeightFormat`."""
        yield from (
            stored_part(part, suffix, (1,), Axes(None, None)).stored for part in param.parts for suffix in self._spare
        )

    def objection(self, param: Param) -> str:
        """Return the reason why a slice cannot be read, or "". See `WeightFormat`."""
        scheme = stored_scheme(param)
        per = WORD // scheme.bits if self.packed else 1
        return next(filter(None, (cuts_blocks(part, scheme, per) for part in param.parts)), "")


def stored_scheme(param: Param) -> Scheme:
    """Return the scheme in which the checkpoint stores a quantized parameter."""
    assert param.stored is not None, f"{param.name} is not quantized"
    return param.stored


FP8 = RowMajor("fp8", blocks="weight_scale_inv")
FBGEMM = RowMajor("fbgemm_fp8", spare=("input_scale_ub",))
MODELOPT = RowMajor("modelopt")
FLOAT = RowMajor("float-quantized")
INT = RowMajor("int-quantized")
PACKED = RowMajor("pack-quantized", packed=True, spare=("weight_shape",))
