"""Grouped-query attention over the paged cache."""

from torch import Tensor, nn

from quire.config.checkpoint import ModelArgs
from quire.kernels.attention import KVView
from quire.layers.context import Build, StepContext
from quire.layers.linear import Linear
from quire.layers.norm import HeadNorm, RMSNorm
from quire.layers.rope import Rotation


class Attention(nn.Module):
    """Projections, optional RMS norm of each query and key head, rotation, cache write, attention, output.

    `group`: the KV group of the layer. The heads are those of this rank. Rows of q and k lie in the order that kernels
    rotate (see `models/layout.py`).
    """

    def __init__(self, args: ModelArgs, at: str, build: Build, group: int = 0) -> None:
        super().__init__()
        self.kernels, self.head_dim = build.kernels, args.head_dim
        self.group, self.window = group, build.window(group)
        self.num_heads, self.num_kv_heads, _ = (rows // args.head_dim for rows in build.rows(f"{at}.qkv.weight"))
        self.eps, self.scale = args.norm_eps, args.head_dim**-0.5
        self.qkv = Linear(f"{at}.qkv", build)
        self.head_norm: HeadNorm | None = None
        if args.qk_norm:
            self.head_norm = HeadNorm(f"{at}.head_norm", self.num_heads, self.num_kv_heads, build.device)
        self.output = Linear(f"{at}.output", build)

    def forward(self, hidden: Tensor, norm: RMSNorm, rotation: Rotation, ctx: StepContext, kv: KVView) -> Tensor:
        """hidden [T, hidden] -> hidden + the layer of norm(hidden), perhaps in hidden's memory.

        Writes this step's keys and values to `kv` before anything attends.
        """
        tokens = hidden.shape[0]
        qkv = self.qkv.normed(hidden, norm).view(tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        head_norm = None if self.head_norm is None else self.head_norm.weight
        meta = ctx.attention[self.group]
        q = self.kernels.heads.prepare(qkv, head_norm, self.eps, *rotation, kv, meta.kv_slots)
        attended = self.kernels.attention.paged_attention(q, kv, meta, self.scale, self.window)
        return self.output.add(attended.view(tokens, self.num_heads * self.head_dim), hidden)
