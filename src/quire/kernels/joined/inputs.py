"""Arguments of the kernels that compute decodes from the projection on, and the steps that these can take."""

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.joined import MOST_DRAFTED, MOST_LANES, MOST_ROWS


@dataclass(frozen=True)
class HeadInputs:
    """The arguments of `quire.kernels.heads.prepare` beside the projection and the cache."""

    norm: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class LatentInputs:
    """The arguments of `quire.kernels.latent.prepare` beside norm, angles and cache. Both are only read.

    q       [T, H, P + R] queries, of which the last R are to be rotated
    given   [T, L + R] latents before their norm, and keys before their rotation
    """

    q: Tensor
    given: Tensor


def decodes_alone(meta: AttentionMeta) -> bool:
    """Return True if all rows of a step are of decodes, with a few of each at most.

    Not with parts of prompts: another sequence of the step may read the blocks that they fill, and here a
    sequence attends before the others have written (see the contract in `kernels.attention`).
    """
    few = 0 < (meta.max_query_len or 0) <= min(meta.decode_len, MOST_DRAFTED)
    return few and meta.shared is None and not meta.prompts and meta.row_positions is None


def few_decodes(qkv: Tensor, kv: KVView, meta: AttentionMeta) -> bool:
    """Return True if a step of the projection qkv [T, Hq + 2 Hkv, D] has few rows, all of decodes."""
    tokens, heads, dim = qkv.shape
    kv_heads, rows = kv.k.shape[1], meta.max_query_len or 0
    return (
        0 < tokens <= MOST_ROWS
        and decodes_alone(meta)
        and kv.k.dtype == qkv.dtype
        and qkv.stride()[1:] == (dim, 1)
        and 0 < (heads - 2 * kv_heads) * rows <= MOST_LANES * kv_heads
    )
