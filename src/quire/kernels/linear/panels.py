"""Linears in float32 arithmetic whose weights stay in their stored type: panels.c has the C code.

A weight of bfloat16 takes half the memory and half the time to read of the same numbers in float32. It is widened in
registers, so results have the accuracy of float32. Quantized weights are widened likewise, and their sums over a group
are multiplied by the scale. Activations are quantized by the scheme's rule, and their scales multiply the sums, too.

The instructions depend on the CPU (`way` says which):
- int8 weights with int8 activations: products and sums in integers (VNNI), which is exact
- numbers that bfloat16 holds exactly (its own, and all quantized ones): pairs, sums in float32 (AVX512-BF16)
- else float32
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.activation import number_of
from quire.kernels.native import memory
from quire.kernels.native.library import loaded
from quire.kernels.pack.halves import gated_outputs, ungated
from quire.kernels.pack.matrix import MIDDLE, QuantizedMatrix, Weight
from quire.kernels.pack.panel_sizes import SCALE_IN, STEP, panels_of
from quire.kernels.quantize.rows import QuantizedRows
from quire.kernels.words import product_words

MOST_CHUNK = 256  # inputs of a chain of sums: see panels.c
FEW_ROWS = 4  # DIRECT of panels.c
KINDS = {torch.float32: 0, torch.bfloat16: 1}
QUANTIZED = {"int8": 2, "w8": 2, "w4": 3, "e4m3": 4, "e2m1": 6}  # Scheme.values -> kind
INPUTS = {"": 0, "token": 1, "group": 2, "tensor": 3}  # Scheme.inputs -> inputs of quire_linear_rows
QUADS = 5  # the kind of "int8" weights if the CPU multiplies int8
SCALES = {torch.float16: 0, torch.float32: 1, torch.uint8: 2, torch.float8_e4m3fn: 3}  # type in quire_linear_panels
POWERS = 4  # as "group", with scales that are powers of two
PLAIN, AS_FLOAT, GATED = range(3)  # out of quire_linear_panels
TYPES = (torch.float32, torch.bfloat16)  # of activations
_NO_SCALES = (None, None, None, None, 0, 0)
ROWS_OF_A_BLOCK = {16: 12, 8: 6}  # lanes of a vector -> MR of panels.c


@dataclass(frozen=True)
class Quantized:
    """Scales, zero points and other numbers of a packed quantized weight, without its values.

    scale         scales in the order of the packed values (panels.c): powers of two as uint8 (E8M0), those of NVFP4 as
                  float8_e4m3fn, else float16 if that is exact, else float32
    zero          zero points, int8, minus the middle of the values' range; None: no zero points
    offset        int32, -128 times the sum of each output's values; None: the values are not int8 for `QUADS`
    order         number of the input that each column of the weight multiplies; None: column k, input k
    input_scale   scale of all activations, if the checkpoint has it
    group         inputs that share a scale; 0: all
    chunk         inputs whose products are added in one chain of sums, see panels.c
    factor        float32, 256 times the factor of each output of NVFP4, in the order of outputs in panels; None: 1
    """

    scheme: Scheme
    scale: Tensor
    zero: Tensor | None
    offset: Tensor | None
    order: Tensor | None
    input_scale: Tensor | None
    group: int
    chunk: int
    factor: Tensor | None = None

    @property
    def rule(self) -> int:
        """Number of the rule by which activations are quantized: argument of quire_linear_rows in panels.c."""
        return POWERS if self.scheme.ue8m0 else INPUTS[self.scheme.inputs]


@dataclass(frozen=True)
class Packed:
    """A weight of `cols` outputs and `inner` inputs in its stored dtype, packed in the order that panels.c reads.

    dtype    dtype of the weight; None: quantized
    gated    True: packed for `run_gated`; half of the outputs belong to gate, half to up
    padded   number of inputs, rounded up to whole groups (inputs that share a scale), or to a multiple of STEP (4)
    quads    True: quantized int8 in the layout of the CPU's int8 unit
    unit     True: the CPU multiplies pairs of bfloat16
    """

    data: Tensor
    dtype: torch.dtype | None
    cols: int
    inner: int
    gated: bool
    padded: int
    quads: bool
    unit: bool
    quantized: Quantized | None = None

    @property
    def kind(self) -> int:
        """Number of the dtype of the stored values, one of `kinds` in panels.c."""
        if self.quantized is None:
            return KINDS[self.dtype]  # type: ignore[index]
        return QUADS if self.quads else QUANTIZED[self.quantized.scheme.values]

    @property
    def fine(self) -> bool:
        """True if the activations have a scale for every 128 inputs."""
        return self.quantized is not None and self.quantized.scheme.inputs == "group"

    def pairs(self, dtype: torch.dtype) -> bool:
        """Return True if the CPU multiplies pairs of bfloat16, and weight and inputs of `dtype` are exact in it."""
        own = self.quantized
        exact = self.dtype == torch.bfloat16 if own is None else not self.quads
        return self.unit and exact and (dtype == torch.bfloat16 or own is not None and own.rule > 0)

    def to_dense(self) -> Tensor:
        """Return the unpacked weight [cols, inner]; for unquantized weights only."""
        lanes = loaded().quire_lanes()
        pairs = (lanes, 2) if self.dtype == torch.bfloat16 else (2, lanes)  # see panels.c
        panels = self.data.view(-1, self.padded, *pairs)
        panels = panels.transpose(2, 3) if self.dtype == torch.bfloat16 else panels
        order = panels.permute(2, 0, 3, 1) if self.gated else panels.permute(0, 2, 3, 1)[None]
        halves = order.flatten(1, -2)[:, : self.cols // len(order), : self.inner]
        return halves.flatten(0, 1).contiguous()


def pack(weight: Weight) -> Packed:
    """Return the weight packed in the layout that `run` reads. See `quire.kernels.linear`."""
    return _pack(weight, False)


def pack_gated(weight: Weight) -> Packed:
    """Return the weight (rows of gate, then of up) packed for `run_gated`. See `quire.kernels.linear`."""
    return _pack(weight, True)


def run(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. See `quire.kernels.linear`."""
    if not packed.gated:
        return _run(x, packed, bias, PLAIN)
    wide = replace(packed, cols=gated_outputs(packed.cols, loaded().quire_lanes()), gated=False)
    y = ungated(_run(x, wide, None, PLAIN), packed.cols, loaded().quire_lanes())
    return y if bias is None else y + bias


def run_float(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias in float32. See `quire.kernels.linear`."""
    return _run(x, packed, bias, AS_FLOAT)


def run_add(x: Tensor, packed: Packed, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x @ weight.T + bias. See `quire.kernels.linear`."""
    return _run(x, packed, bias, PLAIN, residual.contiguous())


def run_gated(x: Tensor | QuantizedRows, packed: Packed, bias: Tensor | None, act: str = "silu") -> Tensor:
    """Return the activation of (gate, up) = x @ weight.T + bias. See `quire.kernels.linear`.

    x may be quantized by the rule of the weight.
    """
    return _run(x, packed, bias, GATED, act=number_of(act))


def way(x: Tensor, packed: Packed) -> str:
    """Return where `run` dequantizes the weight and quantizes x. See `quire.kernels.linear`."""
    own = packed.quantized
    if own is None:
        return ""
    few = len(x) <= FEW_ROWS
    place = "in registers" if few else "in the cache, once for many rows,"
    kind = "bfloat16" if packed.pairs(x.dtype) and (not few or own.scheme.bits == 4) else "float32"
    how = "multiplied in integers" if packed.quads else f"widened {place} to {kind}"
    inputs = "by quire_linear_rows before; their scales multiply the sums"
    return product_words(own.scheme, f"stays packed, {how}", inputs)


def rows(packed: Packed, ids: Tensor) -> Tensor:
    """Return the rows `ids` of a packed weight (an embedding look-up).

    See `quire.kernels.linear`. Rows are float32, the type of the arithmetic.
    """
    if packed.gated or packed.quantized or ids.dtype != torch.int64 or ids.dim() != 1 or not ids.is_cpu:
        raise ValueError(
            f"panels linear: `rows` needs ids [n] int64 on the CPU and an unquantized weight packed by "
            f"`pack`; ids are {ids.dtype} {tuple(ids.shape)} on {ids.device}, and the weight is "
            + ("quantized" if packed.quantized else f"packed by `pack{'_gated' * packed.gated}`")
        )
    ids = ids.contiguous()
    y = torch.empty((ids.shape[0], packed.inner), dtype=torch.float32)
    loaded().quire_linear_unpack_rows(
        packed.data.data_ptr(),
        ids.data_ptr(),
        y.data_ptr(),
        ids.shape[0],
        packed.cols,
        packed.inner,
        packed.padded,
        packed.kind,
        0,
        torch.get_num_threads(),
    )
    return y


def empty(count: int, weight: Weight, gated: bool) -> list[Packed]:
    """Allocate `count` packed weights, shaped like `weight`, in one piece of memory. A huge page can hold several.

    gated   True: they are packed for `run_gated`
    """
    (cols, inner), scheme = weight.shape, None if isinstance(weight, Tensor) else weight.scheme
    if scheme and scheme.block[1] % STEP:
        raise ValueError(
            f"panels linear: the number of inputs that share a scale must be a multiple of {STEP}; it is "
            f"{scheme.block[1]}"
        )
    lanes, quads = loaded().quire_lanes(), bool(loaded().quire_quads())
    made = panels_of((cols, inner), scheme, gated=gated, lanes=lanes, quads=quads)
    size, padded = made.outputs * made.padded, made.padded
    if isinstance(weight, Tensor):
        data, dtype = memory.empty((count, size), weight.dtype), weight.dtype
    else:
        data, dtype = memory.empty((count, size * weight.scheme.bits // 8), torch.uint8), None
    return [Packed(own, dtype, cols, inner, gated, padded, made.quads, bool(loaded().quire_pairs())) for own in data]


def pack_into(packed: Packed, weight: Weight) -> Packed:
    """Pack `weight` into the memory of `packed`. Return `packed`, with the scales if the weight is quantized."""
    cols, inner = weight.shape
    quantized = None if isinstance(weight, Tensor) else _numbers(packed, weight)
    values = weight if isinstance(weight, Tensor) else weight.values.view(torch.uint8)
    if isinstance(weight, Tensor) and weight.dtype not in KINDS or not values.is_cpu or packed.gated and cols % 2:
        raise ValueError(
            f"panels linear: the weight must be float32, bfloat16 or quantized, on the CPU, with an "
            f"even number of rows if gated; it is {values.dtype} {tuple(weight.shape)} on {values.device}"
        )
    if quantized and quantized.scheme.values == "w8":
        values = values ^ 128  # signed
    packed, values = replace(packed, quantized=quantized), values.detach().contiguous()
    loaded().quire_linear_pack(
        values.data_ptr(),
        packed.data.data_ptr(),
        cols,
        inner,
        packed.padded,
        packed.kind,
        int(packed.gated),
        torch.get_num_threads(),
    )
    return packed


def _pack(weight: Weight, gated: bool) -> Packed:
    (packed,) = empty(1, weight, gated)
    return pack_into(packed, weight)


def _numbers(packed: Packed, matrix: QuantizedMatrix) -> Quantized:
    """Bring scales and zero points into the order of panels: [panel][group][column of the panel]."""
    high, group = matrix.scheme.block
    lanes, cols = loaded().quire_lanes(), packed.cols
    rows = torch.arange(-(-cols // (2 * lanes)) * 2 * lanes)
    if packed.gated:
        rows = torch.arange(-(-cols // 2 // lanes) * lanes)
        rows = torch.stack((rows.where(rows < cols // 2, cols), rows + cols // 2), 1).view(-1, lanes, 2)
        rows = rows.transpose(1, 2).flatten()
    rows = rows.clamp(max=cols - 1)  # columns past the end get any scale

    def ordered(numbers: Tensor, height: int = high or cols) -> Tensor:
        return numbers[rows // height].unflatten(0, (-1, 2 * lanes)).transpose(1, 2).contiguous()

    scale, zero, offset = ordered(matrix.scale), None, None
    if matrix.scheme.values == "e4m3":
        scale *= 256  # see panels.c
    if scale.dtype == torch.float32 and torch.equal((half := scale.half()).float(), scale):
        scale = half
    if matrix.zero is not None:
        zero = ordered(matrix.zero.short() - (MIDDLE[matrix.scheme.values])).to(torch.int8)
    factor = None if matrix.factor is None else ordered(matrix.factor * 256, 1)  # see `e4m3` in panels.c
    fine = matrix.scheme.inputs == "group"
    if (zero is not None or fine) and not group:  # zero points need the sums of chunks
        group = packed.padded
    most = math.gcd(group, SCALE_IN) if fine else group
    chunk = max((n for n in range(STEP, MOST_CHUNK + 1, STEP) if most % n == 0), default=0) if group else 0
    if packed.quads:
        offset = ordered(matrix.values.sum(1, dtype=torch.int32)[:, None] * -128, 1)
    return Quantized(
        matrix.scheme,
        scale,
        zero,
        offset,
        matrix.order,
        matrix.input_scale,
        group,
        chunk,
        factor,
    )


def _run(
    x: Tensor | QuantizedRows,
    packed: Packed,
    bias: Tensor | None,
    out: int,
    residual: Tensor | None = None,
    act: int = 0,
) -> Tensor:
    num_rows, inner = x.shape
    cols = packed.cols // 2 if packed.gated else packed.cols
    if x.dtype not in TYPES or inner != packed.inner or x.device.type != "cpu":
        raise ValueError(
            f"panels linear: x must be float32 or bfloat16 [rows, {packed.inner}] on the CPU; it is "
            f"{x.dtype} {tuple(x.shape)} on {x.device}"
        )
    if packed.gated != (out == GATED):
        ways = "`pack_gated`: call run_gated" if packed.gated else "`pack`: call run"
        raise ValueError(f"panels linear: the weight was packed by {ways}, or pack it with the other one")
    if bias is not None and not _fits(bias, x.dtype, (packed.cols,)):
        raise ValueError(
            f"panels linear: the bias must be {packed.cols} numbers of x's dtype on the CPU; it is "
            f"{bias.dtype} {tuple(bias.shape)}"
        )
    if residual is not None and not _fits(residual, x.dtype, (num_rows, cols)):
        raise ValueError(
            f"panels linear: the residual must be {x.dtype} {(num_rows, cols)} on the CPU; it is "
            f"{residual.dtype} {tuple(residual.shape)}"
        )
    y = torch.empty((num_rows, cols), dtype=torch.float32 if out == AS_FLOAT else x.dtype)
    rows, sums, scales = _rows(x, packed)
    own = packed.quantized
    scale, zero, offset, factor, group, chunk = (
        (own.scale, own.zero, own.offset, own.factor, own.group, own.chunk) if own else _NO_SCALES
    )
    loaded().quire_linear_panels(
        rows.data_ptr(),
        _address(sums),
        _address(scales),
        packed.data.data_ptr(),
        _address(scale),
        _address(zero),
        _address(offset),
        _address(factor),
        _address(bias),
        _address(residual),
        y.data_ptr(),
        num_rows,
        cols,
        packed.padded,
        group,
        chunk,
        packed.kind,
        out,
        act,
        x.dtype == torch.bfloat16,
        0 if scale is None else SCALES[scale.dtype],
        packed.pairs(x.dtype),
        packed.fine,
        torch.get_num_threads(),
    )
    return y


def _rows(x: Tensor | QuantizedRows, packed: Packed) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return x in blocks of rows, the sums of chunks that zero points need, and the scales of quantized inputs.

    A single row is such a block already, if it is as it is stored.
    """
    (num_rows, inner), own, sums, scales = x.shape, packed.quantized, None, None
    rule, input_scale = (own.rule, own.input_scale) if own else (0, None)
    if isinstance(x, QuantizedRows):  # divided by 1, their values stay as they are
        given, rule, input_scale = x.values.float(), INPUTS["tensor"], x.scales.new_ones(1)
    else:
        given = x if x.stride(1) == 1 else x.contiguous()
        if own is None and num_rows == 1 and x.dtype == torch.float32 and inner == packed.padded:
            return given, None, None
    size = num_rows * packed.padded
    blocks = torch.empty((-(-size // 4) if packed.quads else size,), dtype=torch.float32)
    if own is not None and own.zero is not None:
        sums = torch.empty((size // own.chunk,), dtype=torch.float32)
    if rule:
        scales = torch.empty((size // SCALE_IN if packed.fine else num_rows,), dtype=torch.float32)
    loaded().quire_linear_rows(
        given.data_ptr(),
        blocks.data_ptr(),
        _address(sums),
        _address(scales),
        _address(own.order if own else None),
        _address(input_scale),
        num_rows,
        inner,
        packed.padded,
        given.stride(0),
        own.chunk if own else 0,
        given.dtype == torch.bfloat16,
        rule,
        packed.kind,
        packed.pairs(x.dtype),
        torch.get_num_threads(),
        127.0 if own and own.scheme.values == "int8" else 448.0,
    )
    if isinstance(x, QuantizedRows):
        scales = _in_blocks(x.scales, packed.padded // SCALE_IN) if packed.fine else x.scales.contiguous().flatten()
    return blocks, sums, scales


def _in_blocks(scales: Tensor, groups: int) -> Tensor:
    """Return scales [rows, G] in the order [block][groups][row of the block] of quire_linear_rows, 1 past G."""
    scales = F.pad(scales, (0, groups - scales.shape[1]), value=1.0)
    high = ROWS_OF_A_BLOCK[loaded().quire_lanes()]
    return torch.cat([block.t().flatten() for block in scales.split(high)]) if len(scales) else scales.flatten()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _fits(added: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return added.dtype == dtype and added.shape == shape and added.is_cpu and added.is_contiguous()
