"""`Scheme`: the numbers of a quantized weight, and the quantization of the activations that it multiplies. No torch.

`Wire`: the form of activations on the way to experts on other ranks.
"""

from dataclasses import dataclass

import msgspec

KINDS = ("fp8 block", "fp8 channel", "int8", "w4", "w8", "mxfp4", "nvfp4")  # of `Scheme.kind`
UNQUANTIZED = "unquantized"  # the kind of a weight without a scheme
GROUP = 128  # columns of a row of activations that share a scale, with the inputs "group"


@dataclass(frozen=True)
class Wire:
    """The form of rows of activations that travel.

    values   "": as they are; "e4m3", "int8": quantized, with computed float32 scales
    group    columns of a row that share a scale; 0: all
    powers   True: scales are rounded up to powers of two
    """

    values: str = ""
    group: int = 0
    powers: bool = False

    def __str__(self) -> str:
        if not self.values:
            return "as they are"
        scales = f"each {self.group} columns" if self.group else "each row"
        return f"in {self.values} with a scale for {scales}" + ", a power of two" * self.powers

    def num_scales(self, columns: int) -> int:
        """Return the number of scales of a row."""
        if not self.values:
            return 0
        return -(-columns // self.group) if self.group else 1

    def row_bytes(self, columns: int, item_bytes: int) -> int:
        """Return the bytes of a row and its scales; a number of an activation has `item_bytes`."""
        return columns + 4 * self.num_scales(columns) if self.values else columns * item_bytes


AS_THEY_ARE = Wire()


@dataclass(frozen=True)
class WirePlan:
    """Form of rows on the way to experts; reason for it, and the line of the code that chose it."""

    form: Wire = AS_THEY_ARE
    decided: str = "no row travels"


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """Quantization of a matrix W [N, K], W = (values - zero) * scale, and of the activations that it multiplies.

    MXFP4 (OCP Microscaling Formats 1.0) is the values "e2m1" in the block (1, 32). NVFP4 is "e2m1" in the block (1, 16)
    with `factor`: W = values * scale * factor.

    values   "e4m3": float8_e4m3fn. "int8": signed. "w4", "w8": unsigned 4- and 8-bit integers, weight only; where
             `zeros` is False, the zero point is 8 for "w4" and 128 for "w8". "e2m1": 4-bit floating point, weight
             only, whose scales are powers of two in a byte each (E8M0), or, with `factor`, float8_e4m3fn
    block    (rows, columns) of the matrix that share a scale; 0: the whole axis. FP8 blocks (128, 128) or (1, 128), per
             channel (1, 0), groups (1, g), per tensor (0, 0). A `QuantizedMatrix` never has (0, 0): each channel gets
             the scale of the tensor, which is exact
    zeros    True: each scale has a zero point
    order    True: columns are permuted (GPTQ's activation order)
    inputs   quantization of activations: "" (none), "token" (computed scale per row), "tensor" (scale from the
             checkpoint), "group" (computed scale per row and 128 columns)
    ue8m0    True: computed scales of activations are rounded up to powers of two
    factor   True: a float32 number multiplies all scales of a stored tensor. A `QuantizedMatrix` has it for each row
    """

    values: str
    block: tuple[int, int]
    zeros: bool = False
    order: bool = False
    inputs: str = ""
    ue8m0: bool = False
    factor: bool = False

    @property
    def kind(self) -> str:
        """Kind of quantized weight, such as "fp8 block" or "w4". A kernel that runs the matrix has it as a feature."""
        if self.values == "e2m1":
            return "nvfp4" if self.factor else "mxfp4"
        if self.values != "e4m3":
            return self.values
        return "fp8 block" if self.block[1] else "fp8 channel"

    @property
    def needs(self) -> frozenset[str]:
        """All features that a kernel must have to run the matrix: `kind`, and "ue8m0" when it is set."""
        return frozenset({self.kind, "ue8m0"} if self.ue8m0 else {self.kind})

    @property
    def wire(self) -> Wire:
        """The form that activations have once they are quantized, where a row has the same form for all matrices."""
        if self.inputs == "group":
            return Wire("e4m3", GROUP, self.ue8m0)
        return Wire(self.values) if self.inputs == "token" else AS_THEY_ARE

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 4 if self.values in ("w4", "e2m1") else 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale of a `QuantizedMatrix`."""
        return 1 if self.values == "e2m1" else 4

    def scales(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the scales of a matrix [rows, columns]: (blocks of rows, blocks of columns)."""
        high, wide = self.block
        return -(-rows // (high or max(rows, 1))), -(-columns // (wide or max(columns, 1)))

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a `QuantizedMatrix` [rows, columns]: values, scales, zero points, order and factors."""
        high, wide = self.scales(rows, columns)
        return (
            rows * -(-columns * self.bits // 8)
            + high * wide * (self.scale_bytes + self.zeros)
            + 4 * columns * self.order
            + 4 * rows * self.factor
        )
