"""The experts of one row by `product`, with 8-bit weights in blocks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.kernels.experts.scaled_stack import Packed
from quire.kernels.one_row.product import MOST_PICKS, Form, Weight, multiply, takes
from quire.kernels.quantize.triton import GROUP


def run(
    x: Tensor,
    chosen: tuple[Tensor, Tensor],
    packed: Packed,
    residual: Tensor | None,
    y: Tensor,
    join: Callable[[], bool] | None = None,
) -> bool:
    """Write the residual and the weighted sum of the experts of the row x [1, H] to y. False: not for this kernel.

    chosen   ids [1, k] int32, all on this rank, and weights [1, k] float32;  join  see `quire.kernels.experts`
    """
    first, second, picks = packed.gate_up, packed.down, chosen[0].shape[1]
    _, hidden, inner = second.values.shape
    up, down = Weight(first.values, first.scales, None, inner), Weight(second.values, second.scales, None, hidden)
    blocks = all(one.block == one.rule == GROUP for one in (first, second))
    gating = Form(8, hidden, True, picks=picks, powers=first.powers)
    adding = Form(8, inner, picks=picks, down=True, powers=second.powers)
    act = packed.act or "none"  # of experts without a gate, which are not for this kernel, either
    taken = takes(gating, x, up, act, residual) and takes(adding, x, down, "", residual)
    if not (blocks and taken) or packed.form.biased or picks > MOST_PICKS or inner % GROUP:
        return False
    h = multiply(gating, x, up, x.new_empty(picks, inner), chosen=chosen)
    multiply(adding, h, down, y, residual=residual, chosen=chosen, overlaps=not (join and join()))
    return True
