"""AWQ and GPTQ, which store the transposed matrix [K, N] in int32 words. No torch.

Values and zero points of a word: `quire.kernels.pack.words`.
"""

from collections.abc import Iterator

from quire.contracts.params import FLOATS, Param, Part, RawTensor
from quire.contracts.scheme import Scheme
from quire.quantization.rows import WORD, stored_scheme
from quire.quantization.slices import Axes, cuts_blocks, group_axis, stored_name, stored_part


class ColumnsFirst:
    """Format that stores the transposed matrix, columns first, in packed words (AWQ, GPTQ). See `WeightFormat`.

    along   axis of the matrix along which values are packed into words: rows (0, AWQ) or columns (1, GPTQ)
    """

    def __init__(self, name: str, along: int, spare: tuple[str, ...] = ()) -> None:
        self.name, self.along, self._spare = name, along, spare

    def tensors(self, param: Param) -> tuple[RawTensor, ...]:
        """Return qweight, scales, qzeros and, with activation order, g_idx of each part. See `WeightFormat`."""
        scheme, own = stored_scheme(param), param.name.rpartition(".")[2]
        return tuple(raw for i, part in enumerate(param.parts) for raw in self._of(part, f"{own}.{i}", scheme))

    def _of(self, part: Part, own: str, scheme: Scheme) -> Iterator[RawTensor]:
        (rows, columns), per, wide = part.shape, WORD // scheme.bits, scheme.block[1]
        groups = scheme.scales(rows, columns)[1]
        packed_rows, packed_columns = (per, 1) if self.along == 0 else (1, per)
        values = stored_part(
            part,
            "qweight",
            (-(-columns // packed_columns), -(-rows // packed_rows)),
            Axes(1, 0, (packed_rows, packed_columns)),
        )
        yield RawTensor(f"{own}.values", values.local_shape, (values,), "int32", ("I32",))
        of_group = group_axis(part, scheme, 0)  # which a slice of columns cuts
        scale = stored_part(part, "scales", (groups, rows), Axes(1, of_group, (1, wide)))
        yield RawTensor(f"{own}.scale", scale.local_shape, (scale,), "float32", FLOATS)
        zero = stored_part(part, "qzeros", (groups, -(-rows // per)), Axes(1, of_group, (per, wide)))
        yield RawTensor(f"{own}.zero", zero.local_shape, (zero,), "int32", ("I32",))
        if scheme.order:
            order = stored_part(part, "g_idx", (columns,), Axes(None, 0))
            yield RawTensor(f"{own}.order", order.local_shape, (order,), "int32", ("I32", "I64"))

    def spare(self, param: Param) -> Iterator[str]:
        """Yield names of stored tensors that need not be read. See `WeightFormat`.

        GPTQ's g_idx is one of them unless the scheme has an activation order.
        """
        yield from (
            stored_name(part, suffix)
            for part in param.parts
            for suffix in self._spare
            if suffix != "g_idx" or not stored_scheme(param).order
        )

    def objection(self, param: Param) -> str:
        """Return the reason why a slice cannot be read, or "". See `WeightFormat`.

        An int32 word of AWQ holds 8 rows, which a slice must not cut.
        """
        scheme = stored_scheme(param)
        per = WORD // scheme.bits
        for part in param.parts:
            if why := cuts_blocks(part, scheme, per if self.along else 1):
                return why
            if self.along == 0 and part.axis == 0 and (part.start % per or part.count % per):
                return (
                    f"{part.stored} is packed in words of {per} rows, which rows {part.start} to "
                    f"{part.start + part.count} of {part.shape[0]} cut"
                )
        return ""


AWQ = ColumnsFirst("awq", 0)
GPTQ = ColumnsFirst("gptq", 1, ("g_idx", "bias"))
GPTQ_V2 = ColumnsFirst("gptq_v2", 1, ("g_idx", "bias"))
