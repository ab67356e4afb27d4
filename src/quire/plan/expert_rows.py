"""Choice of the form in which rows travel to the experts of other replicas: quantized where that changes no result.

Experts with 8-bit activations quantize the rows that come to them. If the scales depend on the row alone, a row that is
quantized before it travels has the same bits as one that is quantized later, and takes about half of the bytes.
"""

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.decision_line import line_of
from quire.contracts.scheme import AS_THEY_ARE, Scheme, WirePlan
from quire.kernels.experts_plan import MoEPlan

WHOLE = 16  # bytes of which rows in symmetric memory consist: `quire.kernels.comm.exchange.ALIGN`


def with_wire(plan: MoEPlan | str, schemes: Collection[Scheme | None], columns: int, item_bytes: int) -> MoEPlan | str:
    """Return the plan of a phase with the form of its rows; without a plan, the reason for that.

    schemes      of the weights that multiply the rows (gate and up), in all layers; None: unquantized
    columns      of a row;  item_bytes  of a number of an activation
    """
    if isinstance(plan, str) or plan.dispatcher == "none":
        return plan
    wire = choose_wire(plan, schemes, columns, item_bytes)
    first, *others = (
        replace(one, wire=wire, quantize_at="wire" if wire.form.values else one.quantize_at)
        for one in (plan, *plan.others)
    )
    return replace(first, others=tuple(others))


def choose_wire(plan: MoEPlan, schemes: Collection[Scheme | None], columns: int, item_bytes: int) -> WirePlan:
    """Choose the form of rows on the way to experts. Arguments as those of `with_wire`."""
    wires = {one.wire if one else AS_THEY_ARE for one in schemes}
    wire = wires.pop() if len(wires) == 1 else AS_THEY_ARE
    whole = wire.group or WHOLE
    if wires:
        why = "layers quantize the rows of experts in different ways"
    elif not wire.values:
        given = any(one and one.inputs for one in schemes)
        why = "each expert has a scale of its own for its rows" if given else "the experts do not quantize rows"
    elif unfit := [one.experts for one in (plan, *plan.others) if "quantized rows" not in one.features]:
        why = f"kernel {unfit[0]} takes no quantized rows"
    elif plan.dispatcher == "pull" and columns % whole:
        why = f"rows of {columns} columns do not divide into parts of {whole}"
    else:
        sizes = wire.row_bytes(columns, item_bytes), columns * item_bytes
        why = "as the experts quantize them, so results stay; {} bytes per row, not {}".format(*sizes)
        return WirePlan(wire, f"{why}, decided in {line_of(choose_wire)}")
    return WirePlan(AS_THEY_ARE, f"{why}, decided in {line_of(choose_wire)}")
