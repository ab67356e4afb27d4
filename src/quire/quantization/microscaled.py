"""Formats that store MXFP4 and NVFP4: bytes of two 4-bit numbers, and a byte of scale for 32 or 16 columns. No torch.

Values of fused parts lie in one tensor; scales stay apart, part by part, and so do the factors of NVFP4.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from quire.contracts.params import FLOATS, Param, Part, RawTensor
from quire.contracts.scheme import Scheme
from quire.quantization.rows import stored_scheme
from quire.quantization.slices import Axes, cuts_blocks, stored_name, stored_part

MXFP4 = Scheme(values="e2m1", block=(1, 32))
NVFP4 = Scheme(values="e2m1", block=(1, 16), factor=True)


class Microscaled:
    """Format that stores a weight [N, K] as bytes of two numbers and bytes of scales. See `WeightFormat` in formats.py.

    values, scales   ends of the tensors' names, as `stored_part` reads them
    blocks           True: values have the shape [N, K / 32, 16]; False: [N, K / 2]
    factor           last word of the name of the number that multiplies all scales, or divides them in "nvfp4-pack-
                     quantized"; "": there is none
    spare            last words of the names of stored tensors that the loader does not need
    """

    def __init__(
        self,
        name: str,
        values: str,
        scales: str,
        *,
        blocks: bool = False,
        factor: str = "",
        spare: str = "",
    ) -> None:
        self.name, self._values, self._scales, self._blocks = name, values, scales, blocks
        self._factor, self._spare = factor, spare

    def tensors(self, param: Param) -> tuple[RawTensor, ...]:
        """Return the values of all parts, then the scales and the factor of each. See `WeightFormat`."""
        wide, own = stored_scheme(param).block[1], param.name.rpartition(".")[2]
        values = tuple(self._values_of(part, wide) for part in param.parts)
        return (
            RawTensor(f"{own}.values", (param.shape[0], *values[0].local_shape[1:]), values, "uint8", ("U8",)),
            *(raw for i, part in enumerate(param.parts) for raw in self._beside(part, f"{own}.{i}", wide)),
        )

    def _values_of(self, part: Part, wide: int) -> Part:
        rows, columns = part.matrix
        shape, unit = ((rows, columns // wide, wide // 2), wide) if self._blocks else ((rows, columns // 2), 2)
        made = stored_part(part, self._values, shape, Axes(0, 1, (1, unit)))
        return replace(made, order=part.order, paired=part.paired)

    def _beside(self, part: Part, own: str, wide: int) -> Iterator[RawTensor]:
        shape = part.matrix[0], -(-part.matrix[1] // wide)
        dtype, readable = ("float8_e4m3fn", "F8_E4M3") if self._factor else ("uint8", "U8")
        scale = stored_part(part, self._scales, shape, Axes(0, 1, (1, wide)))
        yield RawTensor(f"{own}.scale", scale.local_shape, (scale,), dtype, (readable,))
        if self._factor:
            factor = stored_part(part, self._factor, (1,), Axes(None, None))
            yield RawTensor(f"{own}.factor", (1,), (factor,), "float32", FLOATS)

    def spare(self, param: Param) -> Iterator[str]:
        """Yield names of the scales of activations, which are not quantized. See `WeightFormat`."""
        yield from (stored_name(part, self._spare) for part in param.parts if self._spare)

    def objection(self, param: Param) -> str:
        """Return the reason why a slice cannot be read, or "". See `WeightFormat`."""
        scheme = stored_scheme(param)
        return next(filter(None, (cuts_blocks(part, scheme, 2) for part in param.parts)), "")


GPT_OSS = Microscaled("mxfp4", "_blocks", "_scales", blocks=True)
MX_PACKED = Microscaled("mxfp4-pack-quantized", "weight_packed", "weight_scale")
NV_PACKED = Microscaled(
    "nvfp4-pack-quantized",
    "weight_packed",
    "weight_scale",
    factor="weight_global_scale",
    spare="input_global_scale",
)
NV_MODELOPT = Microscaled("modelopt nvfp4", "weight", "weight_scale", factor="weight_scale_2", spare="input_scale")
