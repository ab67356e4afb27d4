"""Sizes of weights that `linear/panels` packs, with their padding and pages. No torch.

N: rows (outputs), K: columns (inputs). A panel has 2 x lanes outputs; lanes: float32 numbers in a vector of the CPU.
"""

import math
from typing import NamedTuple

from quire.contracts.scheme import Scheme
from quire.platforms.cpu import HUGE_PAGE

STEP = 4  # inputs: see panels.c
SCALE_IN = 128  # inputs of a scale of the rule "group"
MOST_QUADS = 1 << 17  # inputs: fewer products of int8 fit in an int32


class Panels(NamedTuple):
    """A packed weight.

    panels   number of panels;  width  outputs of a panel
    padded   number of inputs, rounded up to whole groups (inputs that share a scale), or to a multiple of STEP
    quads    True: quantized int8 in the layout of the CPU's int8 unit
    """

    panels: int
    width: int
    padded: int
    quads: bool

    @property
    def outputs(self) -> int:
        """Number of outputs, with padding."""
        return self.panels * self.width


def panels_of(shape: tuple[int, int], scheme: Scheme | None, *, gated: bool, lanes: int, quads: bool) -> Panels:
    """Return the sizes of a weight [N, K] in panels.

    gated   True: it is packed for `run_gated`, panels have outputs of gate and of up
    quads   True: the CPU multiplies int8
    """
    (rows, columns), width = shape, 2 * lanes
    unit = math.lcm(STEP, scheme.block[1] or 1, SCALE_IN if scheme.inputs == "group" else 1) if scheme else STEP
    padded = -(-columns // unit) * unit
    fits = (
        scheme is not None
        and scheme.values == "int8"
        and scheme.inputs in ("token", "tensor")
        and not (scheme.block[1] or scheme.order)
        and padded < MOST_QUADS
    )
    return Panels(-(-rows // 2 // lanes) if gated else -(-rows // width), width, padded, fits and quads)


def kept_bytes(made: Panels, shape: tuple[int, int], scheme: Scheme, count: int = 1, scale_bytes: int = 4) -> int:
    """Return the bytes of `count` quantized weights [N, K] in panels, which are allocated together.

    scale_bytes   of a packed scale: 2 where float16 holds all scales exactly; of a byte (E8M0, E4M3) 1; else 4
    """
    values = in_pages(count * made.outputs * made.padded * scheme.bits // 8)
    groups = scheme.scales(*shape)[1]
    numbers = scale_bytes + scheme.zeros + 4 * made.quads * (groups == 1)
    each = (
        made.outputs * (groups * numbers + 4 * scheme.factor)
        + 4 * shape[1] * scheme.order
        + 4 * (scheme.inputs == "tensor")
    )
    return values + count * each


def in_pages(size: int) -> int:
    """Return the bytes that a tensor of `size` bytes takes: huge pages from half of one on (`native/memory.py`)."""
    return size if size < HUGE_PAGE // 2 else -(-size // HUGE_PAGE) * HUGE_PAGE
