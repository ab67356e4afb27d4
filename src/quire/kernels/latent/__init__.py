"""Multi-head latent attention (DeepSeek-V2, 2024) over a paged cache of one latent and one rotated key per token.

P, R and V are the widths of a head's plain and rotated query and of its value, L that of the latent, of which each
head makes its keys and values: kv_up [H, P + V, L] holds P rows that make the plain key, then V that make the value.

prepare(q [T, H, P + R], kv [T, L + R], norm [L], eps, cos [T, R], sin [T, R], cache, kv_slots [T] int64) -> q
    The last R of every query head and of kv are rotated (`quire.kernels.rope`: sin is signed), q in its own memory; the
    first L of kv are normalized (`quire.kernels.norm`). What comes of kv is written to the cache at slot = block *
    block_size + offset; block 0 takes padding.
project(x [T, H, K], weights [H, K, N], out [T, H, N]) -> out
    Every head times a matrix of its own: plain queries times the key rows of kv_up are `q_latent`, sums of latents
    times its value rows, transposed, are what attention gives.
absorbed(q_latent [T, H, L], q_rope [T, H, R], cache, meta, scale) -> [T, H, L]
    score = scale * (q_latent . latent + q_rope . rope); the softmax-weighted sums of latents.
expanded(q [T, H, P + R], kv_up [H, P + V, L], cache, meta, scale, out [T, H, V]) -> out
    The same from the other end, for `meta.prompts` alone: keys and values of every head are made of the latents. More
    arithmetic per token of context, less per row and token.

Who attends to what, and the contract of the cache, are those of `quire.kernels.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.attention import AttentionMeta, Prompt, as_list


@dataclass(frozen=True)
class LatentView:
    """One layer's cache inside the arena.

    latent [num_blocks, 1, block_size, L], rope [num_blocks, 1, block_size, R]   strided views: the block stride is the
    page's, the rest is contiguous
    """

    latent: Tensor
    rope: Tensor

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.latent.shape[2]


def sequences(meta: AttentionMeta) -> tuple[Prompt, ...]:
    """Every sequence of a step that has rows, as `meta.prompts` has them; reads the lengths on the host."""
    starts, lengths = as_list(meta.query_start), as_list(meta.seq_lens)
    spans = zip(starts, starts[1:], range(len(lengths)), strict=False)
    return tuple((first, last, s, lengths[s] - last + first) for first, last, s in spans if first < last)
