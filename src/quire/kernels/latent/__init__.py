"""Multi-head latent attention (DeepSeek-V2, 2024) over a paged cache of one latent and one rotated key per token.

Widths: L latent; per head P unrotated ("plain") part of query and key, R rotated part, V value. Each head makes keys
and values of the latent with kv_up [H, P + V, L]: the first P rows make the unrotated key, the last V rows the value.

q_latent, kv_up and parts are contiguous; q, kv and outputs are contiguous inside a token, q_rope inside a head. All
implementations check that (`layouts.py`).

prepare(q [T, H, P + R], kv [T, L + R], norm [L], eps, cos [T, R], sin [T, R], cache, kv_slots [T] int64) -> q
    Rotates the last R elements of every query head, in q's memory, and of kv (`quire.kernels.rope`: sin is signed).
    Normalizes the first L elements of kv (`quire.kernels.norm`). Writes latent and rotated key to the cache at slot =
    block * block_size + offset; padding goes to block 0.
project(x [T, H, K], weights [H, K, N], out [T, H, N]) -> out
    Multiplies each head with its own matrix. It is used twice: unrotated queries times the key rows of kv_up give
    `q_latent`; weighted sums of latents times the transposed value rows give the attention output.
absorbed(q_latent [T, H, L], q_rope [T, H, R], cache, meta, scale, lse=None) -> [T, H, L]
    score = scale * (q_latent . latent + q_rope . rope). Returns the softmax-weighted sums of latents.
    lse [T, H] float32 is an output, for contexts that lie on several ranks: the natural logarithm of the sum of
    exp(score) of each row. Then a sequence has one row at most, and may have no tokens: its lse is -inf, its sums are
    anything.
join(parts [N, T, H, L + W]) -> [T, H, L]
    Adds up the sums of N parts of contexts, in their order, weighted by exp(lse). The last W numbers of a part hold its
    lse (`parts.py`). Rows without tokens in any part become 0.
expanded(q [T, H, P + R], kv_up [H, P + V, L], cache, meta, scale, out [T, H, V]) -> out
    The same attention, for the rows of `meta.prompts` alone: it first makes keys and values of every head from the
    latents. It costs more arithmetic per token of context, and less per pair of row and token.

chosen(q_latent [N, H, L], q_rope [N, H, R], cache, meta, scale, positions [N, K] int32, first=0) -> [N, H, L]
    As `absorbed`, for N rows of the step from row `first` on, but a row attends only to the tokens at `positions` of
    its sequence (`quire.kernels.index`), in which -1 stands behind the last one. A function of implementations with
    the feature "chosen".

`AttentionMeta` and the contract of the cache are those of `quire.kernels.attention`. Features: rows (the implementation
takes `row_positions`), chosen, clusters (`kernels/joined/latent_clusters.py` can run), e4m3 cache, e5m2 cache, and
ds_mla cache (it reads and writes `LatentView.scales`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from quire.kernels.index import IndexView


@dataclass(frozen=True)
class LatentView:
    """MLA cache of a layer: strided views of the KV cache tensor. Without scales each block of a view is contiguous.

    latent   [num_blocks, 1, block_size, L] normalized latents
    rope     [num_blocks, 1, block_size, R] rotated keys
    scale    scale of both in a cache of 8-bit codes; 1 for other types
    index    keys of the layer's indexer; None: it has none
    scales   [num_blocks, 1, block_size, tiles] float32: scales of the codes of latents, which with them and the rotated
             keys in bfloat16 form the rows of tokens (`quire.kernels.latent_rows`); None: all are `scale`
    """

    latent: Tensor
    rope: Tensor
    scale: float = field(default=1.0, compare=False)
    index: IndexView | None = None
    scales: Tensor | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.latent.shape[2]
