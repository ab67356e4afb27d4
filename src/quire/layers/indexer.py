"""The indexer of sparse latent attention: it scores the tokens of a context, and attention reads the best."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.args.latent import IndexArgs
from quire.kernels.attention import AttentionMeta
from quire.kernels.index import Chosen, IndexView
from quire.kernels.rope.rotary import Turn
from quire.layers.context import Build, StepContext
from quire.layers.linear import FloatLinear, Linear

EPS = 1e-6  # of the norm of its keys, in all families


class KeyNorm(nn.Module):
    """Weight and bias [D] of the layer normalization of keys; `both` [2, D]."""

    both: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, at: str, device: torch.device) -> None:
        super().__init__()
        self.at, self._device = at, device

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Stack weight and bias on the layer's device. See `Loads`."""
        self.both = torch.stack([tensors[name] for name in ("weight", "bias")]).to(self._device)
        self.weight, self.bias = self.both


class Indexer(nn.Module):
    """The indexer of a layer. It reads what attention reads: the normed input, and the normed compressed queries.

    q, k, heads   projections to its queries, to its key, and to the weights of its heads, which stay float32
    """

    def __init__(self, args: IndexArgs, at: str, build: Build) -> None:
        super().__init__()
        self.args, self.kernel = args, build.kernels.index
        self.q, self.k = Linear(f"{at}.q", build), Linear(f"{at}.k", build)
        self.heads = FloatLinear(f"{at}.heads", build)
        self.k_norm = KeyNorm(f"{at}.k_norm", build.device)

    def forward(
        self,
        compressed: Tensor,
        read: Sequence[Tensor],
        turn: Turn,
        meta: AttentionMeta,
        cache: IndexView,
        ctx: StepContext,
    ) -> Chosen:
        """Write the step's keys to the cache, and return the tokens that its rows attend to.

        compressed   [T, q_rank] normed compressed queries
        read         projections `k` [T, D] and `heads` [T, Hi] of the normed input
        """
        sizes, (key, heads) = self.args, read
        q = self.q(compressed, ctx).unflatten(1, (sizes.num_heads, sizes.head_dim))
        q = self.kernel.prepare(q, key, self.k_norm.both, EPS, *turn, cache, meta.kv_slots)
        chosen: Chosen = self.kernel.choose(q, heads * sizes.factor, cache, meta, sizes.top_k)
        return chosen

    def write(self, key: Tensor, turn: Turn, meta: AttentionMeta, cache: IndexView) -> None:
        """Write the step's keys to the cache, and choose nothing. key: projection `k` [T, D] of the normed input"""
        none = key.new_empty(len(key), 0, self.args.head_dim)
        self.kernel.prepare(none, key, self.k_norm.both, EPS, *turn, cache, meta.kv_slots)
