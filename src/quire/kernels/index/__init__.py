"""The indexer of sparse latent attention (DSA; DeepSeek-V3.2, 2025): the tokens of its context that a row attends to.

Widths: Hi heads of D dimensions, the first R of which are rotated; keys have one head.

prepare(q [T, Hi, D], k [T, D], norm [2, D], eps, cos [T, R], sin [T, R], cache, kv_slots [T] int64) -> q
    Normalizes k (layer normalization with the weight norm[0] and the bias norm[1]), rotates the first R elements of q,
    in its memory, and of k (`quire.kernels.rope`: sin is signed), and writes k to the cache at slot = block *
    block_size + offset. With Hi = 0 it writes the keys alone.
choose(q [T, Hi, D], weights [T, Hi] float32, cache, meta, top_k) -> Chosen
    score(t, s) = sum over h of weights[t, h] * max(q[t, h] . key[s], 0), in float32, for s up to the row's position.
    The row attends to the `top_k` tokens with the largest scores; of equal scores to the token that comes first. A
    score that is not a number is the largest, so that the row shows it. Rows with at most `top_k` tokens attend to all.
    Sequences with at most `top_k` tokens are not among the chosen ones. Memory grows with rows * top_k, never with
    rows * context.
room(rows, meta, top_k, device) -> Chosen
    What `choose` returns for a step of so many rows, with positions that nothing has been written to.
keep_last(chosen, meta) -> [S, top_k] int32
    The tokens that the last row of each sequence of a step attends to, by `choose`: for a sequence with at most `top_k`
    tokens the positions 0 to top_k - 1.
reuse(kept, meta) -> Chosen
    The same tokens for later rows of these sequences, of which each has one row at most: what `choose` returns for
    them, but nothing is scored. A sequence that had at most `top_k` tokens attends to its first `top_k` tokens.

A cache of 8-bit codes has a scale for each key: the smallest power of two with which no code exceeds the largest
number.
The Hadamard rotation of DeepSeek's own code is left out: it changes no score, and keys in the cache have none.
`AttentionMeta` and the contract of the cache are those of `quire.kernels.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.attention import AttentionMeta, Prompt, sequences


@dataclass(frozen=True)
class IndexView:
    """The keys of a layer's indexer in the KV cache: strided views of its tensor. Each block of a view is contiguous.

    keys     [num_blocks, 1, block_size, D]
    scales   [num_blocks, 1, block_size, 1] float32, of the codes of each key; None: keys are no codes
    """

    keys: Tensor
    scales: Tensor | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.keys.shape[2]


@dataclass(frozen=True)
class Chosen:
    """The tokens that the rows of a step attend to, for all layers that share them.

    sequences   those whose rows attend to some tokens: they have more than `top_k`. Rows of others attend to all
    positions   [N, top_k] int32: of the N rows of these sequences, one after the other, ascending; -1 fills a row that
                has fewer tokens
    decodes     on a GPU, whose lengths the host does not know: the first so many rows of the step are decodes, and
                attend to some tokens, too; theirs are the first rows of `positions`. None: the host knows all lengths,
                and `sequences` has decodes, too
    """

    sequences: tuple[Prompt, ...]
    positions: Tensor
    decodes: int | None = None


def longer(meta: AttentionMeta, top_k: int) -> tuple[Prompt, ...]:
    """Return the sequences of a step with rows and more than `top_k` tokens."""
    return tuple(one for one in sequences(meta) if one[3] + one[1] - one[0] > top_k)
