"""Layers whose decodes run from the projection on in one kernel, and the reason for the others. No torch.

`kernels/joined/decode_attention.py` is this kernel.
"""

from typing import NamedTuple

from quire.args.layers import GroupedArgs
from quire.contracts.parallel import share
from quire.kernels.joined import HEAD_DIMS, MOST_ROWS
from quire.plan.engine import EnginePlan
from quire.plan.kinds.grouped import GroupedKind

# Most query heads of a KV head -> fewest rows of a step from which on the kernel was faster than two (H200,
# docs/performance.md). With 4 and one row both take as long; with 8 it was 5% to 10% of a step slower.
FEWEST_ROWS = {2: 1, 4: 2}


class JoinedDecodes(NamedTuple):
    """The decodes of an attention layer.

    rows   of the steps in which they are one kernel, if the step fits; empty: none
    why    reason for these rows
    """

    rows: range
    why: str


def joined_decodes(plan: EnginePlan) -> dict[int, JoinedDecodes]:
    """Return layer -> its decodes, for each layer with grouped-query attention of a GPU's kernels, in order."""
    chosen = {choice.op: choice for choice in plan.kernels}
    heads, attention = chosen.get("heads"), chosen.get("attention")
    if heads is None or attention is None or heads.name != "triton" or "heads" not in attention.features:
        return {}
    own = {i: one.mixer for i, one in enumerate(plan.args.layers) if isinstance(one.mixer, GroupedArgs)}
    return {i: _decodes(plan, mixer) for i, mixer in own.items()}


def _decodes(plan: EnginePlan, mixer: GroupedArgs) -> JoinedDecodes:
    rank = plan.mesh.rank
    first, end = share(mixer.num_heads, rank.tp, rank.place)
    kv_first, kv_end = GroupedKind(mixer).kv_heads(rank.tp, rank.place)
    each = -(-(end - first) // (kv_end - kv_first))
    words = f"{each} query head{'s' * (each > 1)} of a KV head"
    reasons = {
        "enforce_eager runs each operation by itself": plan.config.device.enforce_eager,
        "the KV cache has 8 bits": bool(plan.cache.features),
        "the layer reads the keys and values of another one": mixer.kv_from >= 0,
        "its values are normed or derived from its keys": bool(mixer.values),
        "its queries grow with their positions": bool(mixer.scores.growth),
        f"heads of {mixer.head_dim} dimensions": mixer.head_dim not in HEAD_DIMS,
        f"with {words} it was slower": each > max(FEWEST_ROWS),
    }
    for reason, holds in reasons.items():
        if holds:
            return JoinedDecodes(range(0), reason)
    fewest = next(rows for most, rows in FEWEST_ROWS.items() if each <= most)
    return JoinedDecodes(range(fewest, MOST_ROWS + 1), f"with {words} it was faster")
