"""Grouped-query attention over the paged cache."""

from torch import Tensor, nn

from quire.args.layers import GroupedArgs
from quire.kernels.attention import KVView
from quire.kernels.rope.rotary import Turns
from quire.layers.context import Build, StepContext
from quire.layers.linear import Linear
from quire.layers.norm import HeadNorm, RMSNorm


class Attention(nn.Module):
    """Grouped-query attention of one layer, with the heads of this rank.

    Its steps: q, k and v projection, optional RMS norm of each query and key head, rotation, write to the KV cache,
    attention, output projection. `group` is the number of the layer's KV group, `turn` that of its rotation. The
    projection's rows for q and k have the order that rotation kernels need (see `plan/layout.py`).
    """

    def __init__(self, args: GroupedArgs, at: str, eps: float, build: Build, group: int = 0, turn: int = 0) -> None:
        super().__init__()
        self.kernels, self.head_dim, self.rotary_dim = build.kernels, args.head_dim, args.rotary_dim
        self.group, self.turn, self.window = group, turn, build.window(group)
        self.num_heads, self.num_kv_heads, _ = (rows // args.head_dim for rows in build.rows(f"{at}.qkv.weight"))
        self.eps, self.scale = eps, args.head_dim**-0.5
        self.qkv = Linear(f"{at}.qkv", build)
        self.head_norm: HeadNorm | None = None
        if args.qk_norm:
            self.head_norm = HeadNorm(f"{at}.head_norm", self.num_heads, self.num_kv_heads, build.device)
        self.output = Linear(f"{at}.output", build)

    def forward(self, hidden: Tensor, norm: RMSNorm, turns: Turns, ctx: StepContext, kv: KVView) -> Tensor:
        """Return hidden + attention(norm(hidden)), [T, hidden]; it may reuse the memory of `hidden`.

        Writes the step's keys and values to `kv` before attention reads them.
        """
        return self.attend(self.qkv.normed(hidden, norm, ctx), hidden, turns, ctx, kv)

    def attend(self, qkv: Tensor, residual: Tensor, turns: Turns, ctx: StepContext, kv: KVView) -> Tensor:
        """Return residual [T, hidden] + the attention of queries, keys and values [T, .]. See `forward`."""
        tokens = residual.shape[0]
        qkv = qkv.view(tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        head_norm = None if self.head_norm is None else self.head_norm.weight
        meta = ctx.attention[self.group]
        q = self.kernels.heads.prepare(qkv, head_norm, self.eps, *turns[self.turn], kv, meta.kv_slots)
        attended = self.kernels.attention.paged_attention(q, kv, meta, self.scale, self.window)
        return self.output.add(attended.view(tokens, self.num_heads * self.head_dim), residual, ctx)
