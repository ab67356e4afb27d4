"""From the tensors that a checkpoint stores to a `QuantizedMatrix`, format by format.

The tensors are those of `quire.quantization.formats`, loaded on one device: "weight.values" (one tensor of all parts,
or "weight.0.values" of each), "weight.0.scale", "weight.0.zero", "weight.0.order", "weight.0.input_scale",
"weight.0.factor".
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quire.contracts.errors import WeightsError
from quire.contracts.params import Param, Part
from quire.contracts.scheme import Scheme
from quire.kernels.pack.matrix import (
    MIDDLE,
    MOST_POWER,
    QuantizedMatrix,
    Room,
    Weight,
    dequantize,
    integers,
    scale_dtype,
    torch_room,
    unpacked,
)
from quire.kernels.pack.nearest import quantized
from quire.kernels.pack.words import WORD, fill_awq, fill_rows, permute, spread
from quire.quantization.formats import FORMATS
from quire.quantization.kfirst import AWQ, GPTQ, GPTQ_V2
from quire.quantization.microscaled import NV_PACKED
from quire.quantization.rows import PACKED
from quire.quantization.slices import mixes_groups, packed_scheme
from quire.quantization.unquantized import ONLINE

NUMBERS = 1 << 22  # of a matrix that are checked at once
E4M3_NAN = 127  # the code of float8_e4m3fn that is NaN; those above are negative


class Findings:
    """Faults in the numbers of a checkpoint, such as NaN. The tests run on the device; only `check` waits for them."""

    def __init__(self) -> None:
        self._found: list[tuple[Param, str, str, Tensor]] = []

    def add(self, param: Param, role: str, words: str, fault: Tensor) -> None:
        """Note the test of a stored tensor for a fault.

        role    tensor of the parameter: "0.scale" for the scale of part 0, "0" for the values of part 0
        words   the fault, for the error message: "has a value that is NaN"
        fault   bool scalar on the device, True if the tensor has the fault
        """
        self._found.append((param, role, words, fault))

    def check(self) -> None:
        """Wait for the device. Raise WeightsError for the first fault, if there is any."""
        found, self._found = self._found, []
        if found and any(faults := torch.stack([one[3] for one in found]).tolist()):  # of one device: one wait
            param, role, words, _ = found[faults.index(True)]
            names = {raw.name.partition(".")[2]: raw.parts[0].stored for raw in FORMATS[param.format].tensors(param)}
            name = names.get(role) or param.parts[int(role)].stored
            raise WeightsError(f"{name} {words}: download the checkpoint again, or use another one.")


def convert(
    param: Param, tensors: Mapping[str, Tensor], dtype: torch.dtype, findings: Findings, room: Room = torch_room
) -> Weight:
    """Convert a parameter's loaded tensors to the weight that a kernel packs. Do not use the tensors afterwards.

    param      one matrix; of stacked experts, the parameter of one expert
    dtype      dtype of the result when the weight is dequantized (`Param.scheme` is None)
    findings   collects the faults that are found
    room       function that allocates the values of the matrix
    """
    own = param.name.rpartition(".")[2]
    if param.format == ONLINE.name:
        assert param.scheme is not None
        made = quantized(tensors[own], param.scheme, room)
        findings.add(param, "0", "has numbers that are not finite", ~made.scale.isfinite().all())
        return made
    if param.stored is None:
        return tensors[own]
    conversion = _Conversion(param, own, tensors, findings, room)
    if mixes_groups(param.parts, param.stored):
        return conversion.mixed().to(dtype)
    matrix = conversion.matrix()
    if param.scheme is not None:
        return widened(matrix, param.scheme, room)
    numbers = dequantize(matrix)
    if matrix.order is not None:
        numbers = numbers[:, matrix.order.argsort()]
    return numbers.to(dtype)


def widened(matrix: QuantizedMatrix, scheme: Scheme, room: Room = torch_room) -> QuantizedMatrix:
    """Return a matrix of integers in a scheme that holds its numbers, which are the same (`common_scheme`).

    Values may get more bits, groups may be parts of the old ones, and zero points may come: v - z stays. `room`
    allocates the values.
    """
    own = matrix.scheme
    if own == scheme:
        return matrix
    assert own.values in MIDDLE and own.bits <= scheme.bits and own.order == scheme.order, (own, scheme)
    (rows, columns), values, zero = matrix.shape, matrix.values, matrix.zero
    if own.bits < scheme.bits:
        values = room((rows, columns), torch.uint8, matrix.device).copy_(unpacked(matrix))
    if zero is None and scheme.zeros:
        zero = torch.full_like(matrix.scale, MIDDLE[own.values], dtype=torch.uint8)
    elif zero is None and own.bits < scheme.bits:
        values += MIDDLE[scheme.values] - MIDDLE[own.values]
    times = scheme.scales(rows, columns)[1] // matrix.scale.shape[1]
    scale, zero = (None if one is None else one.repeat_interleave(times, 1) for one in (matrix.scale, zero))
    assert scale is not None
    return replace(matrix, scheme=scheme, values=values, scale=scale, zero=zero).check()


class _Conversion:
    """The conversion of one matrix. Names are those of `raw_tensors` without the parameter's own."""

    def __init__(self, param: Param, own: str, tensors: Mapping[str, Tensor], findings: Findings, room: Room) -> None:
        assert param.stored is not None
        self.param, self.stored, self.findings, self.room = param, param.stored, findings, room
        self.device = next(iter(tensors.values())).device
        self.tensors = {name.removeprefix(f"{own}."): tensor for name, tensor in tensors.items()}
        self.scheme = packed_scheme(param.parts, param.stored)
        # Blocks that stay blocks keep their scales, whatever the order of the rows inside them.
        self.by_rows = self.scheme.block != self.stored.block or self.scheme.block[0] == 1
        self.transposed = param.format in (AWQ.name, GPTQ.name, GPTQ_V2.name)

    def matrix(self) -> QuantizedMatrix:
        """Return the converted matrix: the scales, zero points and column order of all parts, then their values."""
        scales, zeros, given, factors, order = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor](), None
        for i, part in enumerate(self.param.parts):
            scales.append(self._by_groups(self._by_rows(self._positive(f"{i}.scale"), part), part))
            if f"{i}.zero" in self.tensors:
                zero = self._zero(f"{i}.zero", part)
                zeros += [self._by_groups(self._by_rows(zero, part), part)] * self.stored.zeros
            if self.stored.order:
                order = self._order(f"{i}.order", order)
            if self.stored.inputs == "tensor":
                given.append(self._positive(f"{i}.input_scale"))
            if self.stored.factor:
                factors.append(self._factor(f"{i}.factor").expand(part.rows, 1))
        return QuantizedMatrix(
            self.scheme,
            self._values(order),
            torch.cat(scales).view(scale_dtype(self.scheme)),
            torch.cat(zeros) if zeros else None,
            None if order is None else order.int(),
            # Fused parts read the same activations: the largest scale clamps none of them earlier than its own.
            torch.cat(given).amax() if given else None,
            torch.cat(factors) if factors else None,
        ).check()

    def mixed(self) -> Tensor:
        """Return the numbers of columns of any groups, [rows, columns] float32: a slice in activation order."""
        values, first = integers(self._values(None), self.stored.values), 0
        numbers = values.float()
        for i, part in enumerate(self.param.parts):
            own, scale = numbers[first : first + part.rows], self._positive(f"{i}.scale")
            zero = self._zero(f"{i}.zero", part).float() if f"{i}.zero" in self.tensors else None
            groups = self.tensors[f"{i}.order"].long()
            within = groups.clamp(0, scale.shape[1] - 1)
            words = f"names a group that is not one of {scale.shape[1]}"
            self.findings.add(self.param, f"{i}.order", words, (groups != within).any())
            kept = self.stored.zeros and zero is not None
            own -= zero[:, within] if kept else MIDDLE[self.stored.values]
            own *= scale.float()[:, within]
            first += part.rows
        return numbers

    def _positive(self, name: str) -> Tensor:
        """Return scales as [blocks of rows, blocks of columns]; those of AWQ and GPTQ are stored transposed."""
        scale = self.tensors[name]
        if scale.dtype == torch.uint8:
            fault = (scale > MOST_POWER).any()
            self.findings.add(self.param, name, "has a scale that is NaN or above 2, which no kernel takes", fault)
            return scale
        if scale.dtype == torch.float8_e4m3fn:  # 0 is the scale of a group of zeros
            fault = (scale.view(torch.uint8) >= E4M3_NAN).any()
            self.findings.add(self.param, name, "has a scale that is NaN or below 0", fault)
            return scale.view(torch.uint8)  # PyTorch has few operations for the type itself
        fault = ((scale > 0) & (scale < torch.inf)).all().logical_not()
        self.findings.add(self.param, name, "has a scale that is not a positive number", fault)
        if scale.dim() == 1:
            return scale.view(1, 1)
        return scale.t().contiguous() if self.transposed else scale

    def _factor(self, name: str) -> Tensor:
        """Return the number that multiplies all scales of a part, [1, 1] float32."""
        factor = self._positive(name)
        if self.param.format != NV_PACKED.name:
            return factor
        words = "divides scales by a number so small or large that float32 does not hold the factor"
        factor = 1 / factor
        self.findings.add(self.param, name, words, ~((factor > 0) & factor.isfinite()).all())
        return factor

    def _by_rows(self, blocks: Tensor, part: Part) -> Tensor:
        """Return a number of each block for each row of the part, in the part's order: [rows, blocks of columns]."""
        high, first = self.stored.block[0], 0 if part.axis else part.start
        if not self.by_rows or high == 1 and not (part.order or part.paired):
            return blocks
        rows = ordered(torch.arange(part.rows, device=blocks.device), part)
        return blocks[(first + rows) // high - first // high if high else torch.zeros_like(rows)]

    def _by_groups(self, groups: Tensor, part: Part) -> Tensor:
        """Return a number of each group for each of the equal parts in which the scheme has it: [rows, parts]."""
        stored, own = self.stored.block[1], self.scheme.block[1]
        if own == stored:
            return groups
        first = torch.arange(0, self.param.shape[1], own, device=groups.device) + part.start  # columns
        return groups[:, first // stored - part.start // stored]

    def _zero(self, name: str, part: Part) -> Tensor:
        """Return the zero points of a part, [rows, groups] uint8."""
        packed, bits, form = self.tensors[name], self.stored.bits, self.param.format
        zero = spread(packed if self.transposed else packed.t(), bits, awq=form == AWQ.name).t()
        first = 0 if part.axis else part.start % (WORD // bits)
        zero = zero[first : first + part.rows]
        if form == GPTQ.name:  # one less than the zero point, wrapped
            zero = zero + 1 & (1 << bits) - 1
        if not self.stored.zeros:
            middle = MIDDLE[self.stored.values]
            other = middle + (1 if form == GPTQ.name else -1)  # as the other convention of GPTQ writes it
            fault = ~((zero == middle).all() | (zero == other).all())
            words = f"has a zero point that is not {middle}, although sym is true"
            self.findings.add(self.param, name, words, fault)
        return zero.contiguous()

    def _order(self, name: str, before: Tensor | None) -> Tensor:
        """Return the order of columns in which groups are whole: column order[k] of the checkpoint is column k."""
        groups, wide = self.tensors[name], self.stored.block[1]
        order = groups.argsort(stable=True)
        exact = groups[order] == torch.arange(len(groups), device=groups.device) // wide
        self.findings.add(self.param, name, f"has groups that are not of {wide} columns", ~exact.all())
        if before is not None:
            words = "differs from that of the matrix with which it is fused"
            self.findings.add(self.param, name, words, (order != before).any())
        return order

    def _values(self, order: Tensor | None) -> Tensor:
        """Return the values of all parts, in the types of `QuantizedMatrix`."""
        stored, (rows, columns) = self.stored, self.param.shape
        if self.transposed:
            values = self.room((rows, columns * stored.bits // 8), torch.uint8, self.device)
            parts = values.split([part.rows for part in self.param.parts])
            for i, (out, part) in enumerate(zip(parts, self.param.parts, strict=True)):
                words = self.tensors[f"{i}.values"]
                if self.param.format == AWQ.name:
                    fill_awq(out, words)
                else:
                    fill_rows(out, words.t())
                if part.order or part.paired:
                    out.copy_(ordered(out, part))
        elif self.param.format == PACKED.name:
            values = self.room((rows, columns * stored.bits // 8), torch.uint8, self.device)
            fill_rows(values, self.tensors["values"])
        elif stored.values == "w8":  # stored signed
            values = self.tensors["values"].view(torch.uint8).bitwise_xor_(MIDDLE["w8"])
        else:  # MXFP4 of gpt-oss comes in blocks, [rows, K / 32, 16]
            values = self.tensors["values"].flatten(1)
        if stored.values == "e4m3":
            self._check_codes(values)
        if order is not None:
            permute(values, order, stored.bits)
        return values

    def _check_codes(self, values: Tensor) -> None:
        step = max(NUMBERS // max(values.shape[1], 1), 1)
        parts = values.view(torch.uint8).split([part.rows for part in self.param.parts])
        for i, rows in enumerate(parts):
            faults = [((some & 127) == 127).any() for some in rows.split(step)]
            fault = faults[0] if len(faults) == 1 else torch.stack(faults).any()
            self.findings.add(self.param, str(i), "has a value that is NaN", fault)


def ordered(rows: Tensor, part: Part) -> Tensor:
    """Return the rows of a part, which are in the checkpoint's order, in the part's order."""
    if part.paired:
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
    if not part.order:
        return rows
    return rows.unflatten(0, (-1, len(part.order)))[:, torch.tensor(part.order, device=rows.device)].flatten(0, 1)
