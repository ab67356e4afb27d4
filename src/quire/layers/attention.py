"""Grouped-query attention over the paged cache."""

import torch
from torch import Tensor, nn

from quire.args.layers import MOST_GROWTH_STEPS, GroupedArgs, NormArgs, ScoreArgs
from quire.kernels.attention import KVView
from quire.kernels.joined.choice import JoinedDecodes
from quire.kernels.joined.dispatch import joined_kernel
from quire.kernels.joined.inputs import HeadInputs
from quire.kernels.rope.rotary import Turns
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.linear import Linear
from quire.layers.norm import HeadNorm, WideNorm


class Sinks(nn.Module):
    """Scores beside those of tokens, one for each query head of this rank; their weights belong to no token."""

    weight: Tensor  # [query heads] float32

    def __init__(self, at: str, device: torch.device) -> None:
        super().__init__()
        self.at, self.device = at, device

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Move the scores to the layer's device. See `Loads`."""
        self.weight = tensors["weight"].to(self.device).float()


class QueryGrowth(nn.Module):
    """Queries that grow with their position; see `ScoreArgs`. Formula: Hugging Face's Llama 4 and Ministral-3."""

    def __init__(self, args: ScoreArgs, device: torch.device) -> None:
        super().__init__()
        self.trained, self.ahead = args.trained, args.ahead
        steps = torch.arange(MOST_GROWTH_STEPS, dtype=torch.float64)
        self.factors = (1 + args.growth * torch.log1p(steps)).float().to(device)

    def forward(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return queries q [T, heads, head_dim] at positions [T], times the factor of their position.

        A factor that is rounded to bfloat16 first would be off by up to 0.4%, for all scores of a row.
        """
        steps = ((positions + self.ahead) // self.trained).clamp_(max=MOST_GROWTH_STEPS - 1)
        return torch.mul(q, self.factors[steps][:, None, None], out=torch.empty_like(q))


class Attention(nn.Module):
    """Grouped-query attention of one layer, with the heads of this rank.

    Its steps: q, k and v projection, optional RMS norm of queries, keys and values, rotation, write to the KV cache,
    attention, its gate, output projection. A layer that reads the keys and values of another one projects queries
    alone, and writes nothing. `group` is the number of the KV group that the layer reads, `turn` that of its rotation.
    The projection's rows for q and k have the order that rotation kernels need (see `plan/layout.py`).
    """

    def __init__(self, args: GroupedArgs, at: str, norm: NormArgs, build: Build, group: int = 0, turn: int = 0) -> None:
        super().__init__()
        self.kernels, self.head_dim, self.rotary_dim = build.kernels, args.head_dim, args.rotary_dim
        self.interleaved = args.interleaved
        self.group, self.turn, self.window = group, turn, build.window(group)
        self.projected, self.gated = args.projected, args.gated
        rows = {part.name: part.rows for part in build.params[f"{at}.qkv.weight"].parts}
        self.num_heads = build.shape(f"{at}.output.weight")[1] // args.head_dim
        self.num_kv_heads = rows.get("k", 0) // args.head_dim
        self.values = args.values if self.num_kv_heads else "kept"
        self.eps, self.scale, self.soft_cap = norm.eps, args.factor, args.scores.soft_cap
        self.growth = QueryGrowth(args.scores, build.device) if args.scores.growth else None
        self.qkv = Linear(f"{at}.qkv", build)
        self.head_norm: HeadNorm | None = None
        self.ones: Tensor | None = None  # weights of norms of heads that have none
        self.wide_norm: WideNorm | None = None
        self.sinks = Sinks(f"{at}.sinks", build.device) if args.scores.sinks else None
        if args.qk_norm == "head":
            self.head_norm = HeadNorm(f"{at}.head_norm", self.num_heads, self.num_kv_heads, norm, build.device)
        elif args.qk_norm == "plain":
            self.ones = torch.ones(self.num_heads + self.num_kv_heads, self.head_dim, device=build.device)
        elif args.qk_norm == "whole":
            widths = self.num_heads * args.head_dim, self.num_kv_heads * args.head_dim
            self.wide_norm = WideNorm(f"{at}.wide_norm", widths, norm, build)
        self.output = Linear(f"{at}.output", build)
        self.joined: JoinedDecodes | None = build.kernels.joined.get(at)  # heads and attention in one kernel

    def forward(
        self,
        x: Tensor,
        branch: Branch,
        turns: Turns,
        ctx: StepContext,
        kv: KVView,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + attention(x) by way of `branch`, [T, hidden]; it may reuse the memory of the residual.

        residual   None: x
        Writes the step's keys and values to `kv` before attention reads them.
        """
        tokens, qkv = x.shape[0], branch.project(self.qkv, x, ctx)
        if self.wide_norm is not None:
            qkv = self.wide_norm(qkv)
        gates: Tensor | None = None
        if self.gated:
            width = self.num_heads * self.head_dim
            qkv, gates = qkv[:, :-width], qkv[:, -width:]
        qkv = qkv.unflatten(1, (-1, self.head_dim))
        head_norm = self.ones if self.head_norm is None else self.head_norm.weight
        meta = ctx.attention[self.group]
        cos, sin = turns[self.turn]
        sinks = None if self.sinks is None else self.sinks.weight
        scores = self.scale, self.window, self.soft_cap, sinks
        kernel = None if self.joined is None or ctx.apart else joined_kernel(self.joined, qkv, kv, meta)
        if kernel is not None:
            attended = kernel.attention(qkv, HeadInputs(head_norm, self.eps, cos, sin), kv, meta, *scores)
        else:
            q = self.kernels.heads.prepare(qkv, head_norm, self.eps, cos, sin, kv, meta.kv_slots, self.values)
            if self.growth is not None:
                q = self.growth(q, ctx.positions)
            attended = self.kernels.attention.paged_attention(q, kv, meta, *scores)
        joined = attended.view(tokens, self.num_heads * self.head_dim)
        if gates is not None:
            joined = self.kernels.activation.opened(joined, gates)
        return branch.add(self.output, joined, x if residual is None else residual, ctx)
