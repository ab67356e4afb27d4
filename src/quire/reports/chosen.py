"""Costs of attention to chosen tokens (DSA), beside those of attention to all, for `explain`. No torch."""

from collections.abc import Sequence
from math import ceil, sqrt
from typing import Any

from quire.args.latent import IndexArgs, LatentArgs
from quire.contracts.blocks import KVComponent
from quire.plan.engine import EnginePlan
from quire.plan.kv_geometry import kv_components

LENGTHS = (4096, 32_768, 131_072)  # contexts of the examples


def describe_chosen(plan: EnginePlan) -> dict[str, Any] | None:
    """Return plain values about the indexers of a model; None: it has none.

    indexed, shared     numbers of the layers with an indexer, and of those that share one
    latent_bytes, index_bytes   bytes of a token in a layer's cache: of the latent, and of the indexer's key
    reads               [context, bytes of a decode's attention to all tokens, to chosen ones], over all layers
    decode_break_even   tokens of context above which a decode reads less with selection than without, absorbed
    prompt_break_even   tokens of a prompt above which its attention has fewer operations with selection (indexer, then
                        absorbed) than without (expanded), with the heads of a rank; None: never
    length              longest context of the engine
    """
    args = plan.args
    own = [one.mixer for one in args.layers[: args.num_layers]]
    latent, index = next(
        ((one, one.index) for one in own if isinstance(one, LatentArgs) and one.index is not None), (None, None)
    )
    if latent is None or index is None:
        return None
    shared = [i for i, one in enumerate(own) if isinstance(one, LatentArgs) and one.index and one.index.shared]
    parts = kv_components(latent, plan.cache.dtype)
    wide = _token_bytes([one for one in parts if not one.name.startswith("index")])
    narrow = _token_bytes([one for one in parts if one.name.startswith("index")])
    layers, indexed = len(own), len(own) - len(shared)
    length = plan.config.model.max_model_len or args.max_position_embeddings
    return {
        "top_k": index.top_k,
        "heads": index.num_heads,
        "head_dim": index.head_dim,
        "indexed": [layer for layer in range(layers) if layer not in shared],
        "shared": shared,
        "latent_bytes": wide,
        "index_bytes": narrow,
        "reads": [
            [n, n * wide * layers, n * narrow * indexed + min(n, index.top_k) * wide * layers]
            for n in LENGTHS
            if n <= length
        ],
        "decode_break_even": decode_break_even(index.top_k, wide * layers, narrow * indexed),
        "prompt_break_even": prompt_break_even(latent, index, plan.mesh.parallel.tp, indexed / layers),
        "length": length,
    }


def _token_bytes(parts: Sequence[KVComponent]) -> int:
    return sum(one.num_heads * one.head_dim * one.item_bytes for one in parts)


def decode_break_even(top_k: int, latent_bytes: int, index_bytes: int) -> int | None:
    """Return the shortest context n at which n * index_bytes + top_k * latent_bytes is below n * latent_bytes.

    latent_bytes, index_bytes   of a token, over all layers
    None: there is none
    """
    saved = latent_bytes - index_bytes
    return top_k * latent_bytes // saved + 1 if saved > 0 else None


def prompt_break_even(latent: LatentArgs, index: IndexArgs, tp: int, share: float) -> int | None:
    """Return the shortest prompt n whose attention has fewer operations with selection than without.

    Operations of a pair of row and token: a = 2 H (P + R + V) expanded, b = 2 H (2 L + R) absorbed, i = 2 Hi Di of an
    indexer, which `share` of the layers have. Rows have up to n tokens before them, and choose K at most:
    n^2 / 2 (a - i) = b (n K - K^2 / 2). Up-projections cost the same both ways.
    H: heads of a rank of `tp`. None: there is none
    """
    heads = ceil(latent.num_heads / tp)
    a = 2 * heads * (latent.nope_dim + latent.rope_dim + latent.v_dim)
    b = 2 * heads * (2 * latent.kv_rank + latent.rope_dim)
    saved = a - 2 * index.num_heads * index.head_dim * share
    if saved <= 0:
        return None
    ratio = b / saved
    return int(index.top_k * ratio * (1 + sqrt(max(0.0, 1 - 1 / ratio)))) + 1
