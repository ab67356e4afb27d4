"""Decodes from the projection on in one kernel, for `explain`. No torch."""

from typing import Any

from quire.kernels.joined.choice import JoinedDecodes
from quire.plan.engine import EnginePlan
from quire.plan.joined import joined_decodes


def describe_joined(plan: EnginePlan) -> list[dict[str, Any]]:
    """Return the layers of each kind of decodes as plain values.

    layers                     their numbers
    latent                     True: latent attention, whose kernel is `latent_clusters` in place of `decode_clusters`
    sequences, why_sequences   most sequences of a step that `decode_clusters` takes, and the reason; 0: none
    rows                       fewest and most rows of the steps that `decode_attention` takes; None: none
    why                        the reason
    context                    most tokens of a sequence in steps for `decode_clusters`; 0: of the engine
    """
    alike = dict[JoinedDecodes, list[int]]()
    for layer, one in joined_decodes(plan).items():
        alike.setdefault(one, []).append(layer)
    return [
        {"layers": layers} | one._asdict() | {"rows": [one.rows[0], one.rows[-1]] if one.rows else None}
        for one, layers in alike.items()
    ]
