"""The kernel that computes decodes from the projection on, and the reason. No torch."""

from typing import NamedTuple

from quire.args.layers import GroupedArgs
from quire.kernels.joined import CLUSTER_DIMS, HEAD_DIMS, MOST_LANES, MOST_ROWS

# Most query heads of a KV head -> fewest rows of a step from which on `decode_attention` was faster than two kernels
# (H200, docs/performance.md). With 4 heads and one row both take as long; with 8 a step took 5% to 11% longer.
FEWEST_ROWS = {2: 1, 4: 2}
CLUSTERS = "decode_clusters"  # was faster in all steps that were measured


class JoinedDecodes(NamedTuple):
    """The decodes of an attention layer.

    rows     of the steps in which they are one kernel, if the step fits; empty: none
    why      reason for these rows
    kernel   its module in `kernels/joined`
    """

    rows: range
    why: str
    kernel: str = "decode_attention"


def choose_decodes(mixer: GroupedArgs, each: int, *, eager: bool, eight_bits: bool, clusters: str) -> JoinedDecodes:
    """Choose for an attention layer, with kernels for a GPU.

    each         query heads of a KV head, on this rank
    eager        steps are not captured as CUDA graphs, so that each operation can be seen
    eight_bits   the KV cache has 8 bits
    clusters     reason why `decode_clusters` cannot run here, or ""
    """
    words = f"with {each} query head{'s' * (each != 1)} of a KV head"
    reasons = {
        "enforce_eager runs each operation by itself": eager,
        "the KV cache has 8 bits": eight_bits,
        "the layer reads the keys and values of another one": mixer.kv_from >= 0,
        "its values are normed, or made of its keys": bool(mixer.values),
        "its queries grow with their positions": bool(mixer.scores.growth),
        f"it has no heads of {mixer.head_dim} dimensions": mixer.head_dim not in HEAD_DIMS,
    }
    for reason, holds in reasons.items():
        if holds:
            return JoinedDecodes(range(0), reason)
    against = {
        clusters: bool(clusters),
        f"it has no heads of {mixer.head_dim} dimensions": mixer.head_dim not in CLUSTER_DIMS,
        f"it has no {each} query heads of a KV head": each > MOST_LANES,
        "it caps no scores": mixer.scores.soft_cap is not None,
        "it has no chunks": (mixer.window or 0) < 0,
    }
    why_not = next((reason for reason, holds in against.items() if holds), "")
    if not why_not:
        return JoinedDecodes(range(1, MOST_ROWS + 1), f"{words} it was faster", CLUSTERS)
    why_not = f"; not {CLUSTERS}: {why_not}"
    if each > max(FEWEST_ROWS):
        return JoinedDecodes(range(0), f"{words} it was slower{why_not}")
    fewest = next(rows for most, rows in FEWEST_ROWS.items() if each <= most)
    return JoinedDecodes(range(fewest, MOST_ROWS + 1), f"{words} it was faster{why_not}")
