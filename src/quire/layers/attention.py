"""Grouped-query attention over the paged cache."""

import torch
from torch import Tensor, nn

from quire.config.checkpoint import ModelArgs
from quire.kernels.attention import KVView
from quire.layers.context import Build, StepContext
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rotation


def head_order(rotary_dim: int, head_dim: int) -> Tensor:
    """The dimensions of a checkpoint's head in the order of `Attention.pack` [head_dim]: the halves of the rotated part
    begin the halves of the head."""
    half, rotated, rest = rotary_dim // 2, torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    return torch.cat((rotated[:half], rest[: len(rest) // 2], rotated[half:], rest[len(rest) // 2 :]))


class Attention(nn.Module):
    """Projections, optional RMS norm of each query and key head, rotation, cache write, attention, output."""

    def __init__(self, args: ModelArgs, build: Build) -> None:
        super().__init__()
        self.kernels = build.kernels
        self.num_heads, self.num_kv_heads, self.head_dim = args.num_heads, args.num_kv_heads, args.head_dim
        self.eps = args.norm_eps
        self.scale = args.head_dim**-0.5
        q_size, kv_size = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
        parts = {"q": q_size, "k": kv_size, "v": kv_size}
        self.qkv = Linear(args.hidden_size, parts, args.attention_bias, build)
        self.output = Linear(q_size, {"": args.hidden_size}, args.output_bias, build)
        self.q_norm = RMSNorm(args.head_dim, args.norm_eps, build) if args.qk_norm else None
        self.k_norm = RMSNorm(args.head_dim, args.norm_eps, build) if args.qk_norm else None
        self.head_norm: Tensor | None = None
        self.rotary_dim = args.rotary_dim

    def pack(self) -> None:
        """Stack the two norms' weights by head, so that q and k are normalized in one call.

        Where only the first dimensions of a head are rotated, those of q and k are reordered, so that the halves of the
        rotated part begin the halves of the head: kernels rotate whole heads, the rest of them by nothing.
        """
        if self.rotary_dim < self.head_dim:
            self._reorder()
        if self.q_norm is None or self.k_norm is None:
            return
        q, k = self.q_norm.weight, self.k_norm.weight
        self.head_norm = torch.cat((q.expand(self.num_heads, -1), k.expand(self.num_kv_heads, -1))).detach()

    @torch.no_grad()
    def _reorder(self) -> None:
        order = head_order(self.rotary_dim, self.head_dim)
        heads = self.num_heads + self.num_kv_heads
        rows = (torch.arange(heads)[:, None] * self.head_dim + order).flatten()
        for parameter in (self.qkv.weight, self.qkv.bias):
            if parameter is not None:
                parameter[: len(rows)] = parameter[rows.to(parameter.device)]
        for head_norm in (self.q_norm, self.k_norm):
            if head_norm is not None:
                head_norm.weight.copy_(head_norm.weight[order.to(head_norm.weight.device)])

    def forward(self, hidden: Tensor, norm: RMSNorm, rotation: Rotation, ctx: StepContext, kv: KVView) -> Tensor:
        """hidden [T, hidden] -> hidden + the layer of norm(hidden), perhaps in hidden's memory.

        Writes this step's keys and values to `kv` before anything attends.
        """
        tokens = hidden.shape[0]
        qkv = self.qkv.normed(hidden, norm).view(tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        q = self.kernels.heads.prepare(qkv, self.head_norm, self.eps, *rotation, kv, ctx.attention.kv_slots)
        attended = self.kernels.attention.paged_attention(q, kv, ctx.attention, self.scale)
        return self.output.add(attended.view(tokens, self.num_heads * self.head_dim), hidden)
