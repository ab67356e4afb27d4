"""Formats that store MXFP4: bytes of two 4-bit numbers, and a byte of scale for 32 columns. No torch.

Values of fused parts lie in one tensor; scales stay apart, part by part.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from quire.contracts.params import Param, Part, RawTensor
from quire.contracts.scheme import Scheme
from quire.quantization.rows import stored_scheme
from quire.quantization.slices import Axes, cuts_blocks, stored_part

MXFP4 = Scheme(values="e2m1", block=(1, 32))


class Microscaled:
    """Format that stores a weight [N, K] as bytes of two numbers and bytes of scales. See `WeightFormat` in formats.py.

    values, scales   ends of the tensors' names, as `stored_part` reads them
    blocks           True: values have the shape [N, K / 32, 16]; False: [N, K / 2]
    """

    def __init__(self, name: str, values: str, scales: str, *, blocks: bool) -> None:
        self.name, self._values, self._scales, self._blocks = name, values, scales, blocks

    def tensors(self, param: Param) -> tuple[RawTensor, ...]:
        """Return the values of all parts, then the scales of each. See `WeightFormat`."""
        wide, own = stored_scheme(param).block[1], param.name.rpartition(".")[2]
        values = tuple(self._values_of(part, wide) for part in param.parts)
        scales = tuple(
            stored_part(part, self._scales, (part.matrix[0], -(-part.matrix[1] // wide)), Axes(0, 1, (1, wide)))
            for part in param.parts
        )
        return (
            RawTensor(f"{own}.values", (param.shape[0], *values[0].local_shape[1:]), values, "uint8", ("U8",)),
            *(
                RawTensor(f"{own}.{i}.scale", scale.local_shape, (scale,), "uint8", ("U8",))
                for i, scale in enumerate(scales)
            ),
        )

    def _values_of(self, part: Part, wide: int) -> Part:
        rows, columns = part.matrix
        shape, unit = ((rows, columns // wide, wide // 2), wide) if self._blocks else ((rows, columns // 2), 2)
        made = stored_part(part, self._values, shape, Axes(0, 1, (1, unit)))
        return replace(made, order=part.order, paired=part.paired)

    def spare(self, param: Param) -> Iterator[str]:
        """Yield nothing: the loader needs all tensors. See `WeightFormat`."""
        yield from ()

    def objection(self, param: Param) -> str:
        """Return the reason why a slice cannot be read, or "". See `WeightFormat`."""
        scheme = stored_scheme(param)
        return next(filter(None, (cuts_blocks(part, scheme, 2) for part in param.parts)), "")


GPT_OSS = Microscaled("mxfp4", "_blocks", "_scales", blocks=True)
MX_PACKED = Microscaled("mxfp4-pack-quantized", "weight_packed", "weight_scale", blocks=False)
