"""Decodes from the projection on in one kernel, for `explain`. No torch."""

from typing import Any

from quire.kernels.joined.choice import JoinedDecodes
from quire.plan.engine import EnginePlan
from quire.plan.joined import joined_decodes


def describe_joined(plan: EnginePlan) -> list[dict[str, Any]]:
    """Return the layers of each kind of decodes as plain values.

    layers   their numbers
    rows     fewest and most rows of a step in which decodes are one kernel; None: they are two
    why      the reason
    kernel   its name
    """
    alike = dict[JoinedDecodes, list[int]]()
    for layer, one in joined_decodes(plan).items():
        alike.setdefault(one, []).append(layer)
    return [
        {
            "layers": layers,
            "rows": [one.rows[0], one.rows[-1]] if one.rows else None,
            "why": one.why,
            "kernel": one.kernel,
        }
        for one, layers in alike.items()
    ]
