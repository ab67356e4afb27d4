"""The decodes that `decode_clusters` and `decode_attention` compute, and the reasons. No torch."""

from typing import NamedTuple

from quire.args.latent import LatentArgs
from quire.args.layers import GroupedArgs
from quire.kernels.joined import HEAD_DIMS, MOST_LANES, MOST_ROWS

# Most query heads of a KV head -> fewest rows of a step from which on `decode_attention` was faster than two kernels
# (H200, docs/performance.md). With 4 heads and one row both take as long; with 8 a step took 5% to 11% longer.
FEWEST_ROWS = {2: 1, 4: 2}
# `decode_clusters`: heads and numbers of query heads with which it was measured. With more clusters (sequences times KV
# heads) it was faster for short contexts only: four sequences of 8,000 tokens took 8% longer. A sequence has 8 blocks
# for a KV head, which read less at a time than the whole GPU: with 8 KV heads a step was 24% faster after 512 tokens,
# 7% after 8,000, and would be slower after 14,000.
CLUSTER_DIM, CLUSTER_QUERIES, MOST_CLUSTERS = 128, 8, 16
CLUSTER_CONTEXT = 1024  # tokens of the longest context of a step, for each KV head
# `latent_clusters`: sizes of latent and rotated key that it takes; most clusters (sequences times groups of heads) and
# most tokens of the longest context of a step. Measured with 16 heads: after 512 tokens a step of DeepSeek-V2-Lite was
# 8% faster, after 7,900 as fast as with three kernels. More heads are several clusters, which all read the context.
LATENT_DIM, KEY_DIM, MOST_LATENT_CLUSTERS, LATENT_CONTEXT = 512, 64, 16, 8192


class JoinedDecodes(NamedTuple):
    """The decodes of an attention layer that are one kernel, if the step fits it; the others are two.

    sequences, why_sequences   most sequences of a step for `decode_clusters`; 0: none; the reason
    rows, why                  rows of the other steps, for `decode_attention`; empty: none; the reason
    context                    most tokens of a sequence in the steps for `decode_clusters`; 0: no sequence has too many
    latent                     True: a layer with latent attention, whose kernel is `latent_clusters`, and no other one
    """

    sequences: int
    why_sequences: str
    rows: range
    why: str
    context: int = 0
    latent: bool = False


def choose_decodes(
    mixer: GroupedArgs, heads: tuple[int, int], *, eager: bool, eight_bits: bool, clusters: str, context: int
) -> JoinedDecodes:
    """Choose for an attention layer, with kernels for a GPU.

    heads        query heads and KV heads of this rank
    eager        steps are not captured as CUDA graphs, so that each operation can be seen
    eight_bits   the KV cache has 8 bits
    clusters     reason why `decode_clusters` cannot run here, or ""
    context      tokens of the longest sequence
    """
    each = heads[0] // heads[1]
    seen, most = min(context, mixer.window or context), CLUSTER_CONTEXT * heads[1]
    words = f"with {each} query head{'s' * (each != 1)} of a KV head"
    neither = {
        "enforce_eager runs each operation by itself": eager,
        "the KV cache has 8 bits": eight_bits,
        "the layer reads the keys and values of another one": mixer.kv_from >= 0,
        "its values are normed, or made of its keys": bool(mixer.values),
        "its queries grow with their positions": bool(mixer.scores.growth),
    }
    against = neither | {
        clusters: bool(clusters),
        f"heads of {mixer.head_dim} dimensions were not measured": mixer.head_dim != CLUSTER_DIM,
        f"{each} query heads of a KV head were not measured": each > CLUSTER_QUERIES,
        f"{heads[1]} KV heads were slower in long contexts": heads[1] > MOST_CLUSTERS,
        "scores are capped": mixer.scores.soft_cap is not None,
        "contexts are cut into chunks": (mixer.window or 0) < 0,
    }
    why_not = next((reason for reason, holds in against.items() if holds), "")
    few = (0, why_not) if why_not else (MOST_CLUSTERS // heads[1], f"{words} it was faster")
    reach = {"context": most if seen > most and not why_not else 0}
    against = neither | {
        f"it has no heads of {mixer.head_dim} dimensions": mixer.head_dim not in HEAD_DIMS,
        f"{words} it was slower": each > max(FEWEST_ROWS),
    }
    if reason := next((reason for reason, holds in against.items() if holds), ""):
        return JoinedDecodes(*few, range(0), reason, **reach)
    fewest = next(rows for most, rows in FEWEST_ROWS.items() if each <= most)
    return JoinedDecodes(*few, range(fewest, MOST_ROWS + 1), f"{words} it was faster", **reach)


def choose_latent(
    mixer: LatentArgs, heads: int, *, eager: bool, eight_bits: bool, clusters: str, context: int, divided: bool
) -> JoinedDecodes:
    """Choose for a layer with latent attention. See `choose_decodes`.

    heads     of this rank
    divided   contexts lie on several ranks
    """
    groups = heads // latent_group(heads, 1)
    against = {
        "enforce_eager runs each operation by itself": eager,
        "the KV cache has 8 bits": eight_bits,
        "contexts are divided among ranks": divided,
        "its rows attend to chosen tokens": mixer.index is not None,
        clusters: bool(clusters),
        f"it has no latents of {mixer.kv_rank} and {mixer.rope_dim} dimensions": (mixer.kv_rank, mixer.rope_dim)
        != (LATENT_DIM, KEY_DIM),
        f"more heads than {MOST_LANES} were not measured": groups > 1,
    }
    if reason := next((reason for reason, holds in against.items() if holds), ""):
        return JoinedDecodes(0, reason, range(0), reason, latent=True)
    words = f"with {heads} heads it was faster"
    most = LATENT_CONTEXT if context > LATENT_CONTEXT else 0
    return JoinedDecodes(MOST_LATENT_CLUSTERS, words, range(0), words, most, latent=True)


def latent_group(heads: int, rows: int) -> int:
    """Return the heads that a cluster of `latent_clusters` has, of sequences of so many rows."""
    return max(n for n in range(1, MOST_LANES // rows + 1) if heads % n == 0)
