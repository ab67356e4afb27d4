"""Steps of a layer of transformers that call our layers."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.distributed import Group
from quire.foreign.program import LayerRun, Ours
from quire.kernels.select import Kernels
from quire.layers.linear import ActivatedLinear, GatedLinear, Linear
from quire.layers.moe import Experts
from quire.layers.norm import HeadNorm, Norm


class Projection(Ours):
    """A linear layer: x [T, N] -> [T, M], of norm(x) where a norm is given; summed over ranks that have its inputs."""

    def __init__(self, linear: Linear, norm: Norm | None = None) -> None:
        self.linear, self.norm = linear, norm

    def __call__(self, run: LayerRun, *values: Tensor) -> Tensor:
        """Return the projection."""
        if self.norm is not None:
            return self.linear.normed(values[0], self.norm, run.ctx)
        return self.linear.summed(values[0], run.ctx)


class Added(Ours):
    """A linear layer whose result is added to the residual stream, whose memory it may reuse."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, run: LayerRun, *values: Tensor) -> Tensor:
        """Return residual + the projection of x."""
        x, residual = values
        return self.linear.add(x, residual, run.ctx)


class Normed(Ours):
    """A norm."""

    def __init__(self, norm: Norm) -> None:
        self.norm = norm

    def __call__(self, run: LayerRun, *values: Tensor) -> Tensor:
        """Return the norm of x."""
        out: Tensor = self.norm(values[0])
        return out


class NormAdded(Ours):
    """A norm whose result is added to the residual stream, whose memory it may reuse."""

    def __init__(self, norm: Norm) -> None:
        self.norm = norm

    def __call__(self, run: LayerRun, *values: Tensor) -> Tensor:
        """Return residual + the norm of x."""
        x, residual = values
        return self.norm.added(x, residual)


class Activated(Ours):
    """A linear layer with an activation, gated or not: x [T, N] -> [T, I], of norm(x) where a norm is given."""

    def __init__(self, linear: GatedLinear | ActivatedLinear) -> None:
        self.linear = linear
        self.norm: Norm | None = None

    def __call__(self, run: LayerRun, *values: Tensor) -> Tensor:
        """Return the activation of the projection of x."""
        (x,) = values
        return self.linear(x, run.ctx) if self.norm is None else self.linear.normed(x, self.norm, run.ctx)


class ChosenExperts(Ours):
    """Experts that the module has chosen: x [T, H], ids and weights [T, k] -> [T, H], summed over ranks."""

    def __init__(self, experts: Experts, tp: Group | None) -> None:
        self.experts, self.tp = experts, tp

    def __call__(self, run: LayerRun, *values: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts."""
        x, ids, weights = values
        out = self.experts(x.contiguous(), weights.float(), ids.to(torch.int32), None, adapters=run.ctx.adapters)
        return out if self.tp is None else self.tp.all_reduce(out)


@dataclass
class Attends:
    """The attention of a layer. group, window, num_heads, head_dim: as in `quire.layers.attention.Attention`."""

    kernels: Kernels = field(compare=False)
    group: int
    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None

    def prepared(self, run: LayerRun, qkv: Tensor, norm: Tensor | None, eps: float, turn: int) -> Tensor:
        """Prepare queries [T, heads, D] and write keys and values of qkv [T, all heads, D]."""
        cos, sin = run.turns[turn]
        slots = run.ctx.attention[self.group].kv_slots
        q: Tensor = self.kernels.heads.prepare(qkv, norm, eps, cos, sin, run.kv, slots, "")
        return q

    def attended(self, run: LayerRun, q: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the attention of queries, [T, heads, D]."""
        meta = run.ctx.attention[self.group]
        out: Tensor = self.kernels.attention.paged_attention(
            q, run.kv, meta, self.scale, self.window, self.soft_cap, None if sinks is None else sinks.float()
        )
        return out


class PreparedAttention(Ours):
    """Projection, norms and rotation of heads, write of keys and values, and attention: x [T, H] -> [T, heads * D]."""

    def __init__(self, linear: Linear, attends: Attends, turn: int, head_norm: HeadNorm | None) -> None:
        self.linear, self.attends, self.turn, self.head_norm = linear, attends, turn, head_norm
        self.norm: Norm | None = None

    def __call__(self, run: LayerRun, *values: Tensor) -> Tensor:
        """Return the attention of x. A second value: the sinks."""
        x, own = values[0], self.attends
        qkv = self.linear(x, run.ctx) if self.norm is None else self.linear.normed(x, self.norm, run.ctx)
        weight, eps = (None, 0.0) if self.head_norm is None else (self.head_norm.weight, self.head_norm.args.eps)
        q = own.prepared(run, qkv.unflatten(1, (-1, own.head_dim)), weight, eps, self.turn)
        sinks = values[1] if len(values) > 1 else None
        return own.attended(run, q, sinks).view(len(x), own.num_heads * own.head_dim)


class PlainAttention(Ours):
    """Attention of queries [1, heads, T, D], keys and values that the module has made: -> [1, T, heads, Dv]."""

    whole = True  # it takes the module's shapes

    def __init__(self, attends: Attends, turn: int) -> None:
        self.attends, self.turn = attends, turn

    def __call__(self, run: LayerRun, *values: Tensor) -> Tensor:
        """Return the attention. A fourth value: the sinks."""
        q, k, v = (one[0].transpose(0, 1) for one in values[:3])
        own, width = self.attends, v.shape[2]
        if width < own.head_dim:
            v = F.pad(v, (0, own.head_dim - width))
        rows = own.prepared(run, torch.cat((q, k, v), 1), None, 0.0, self.turn)
        return own.attended(run, rows, values[3] if len(values) > 3 else None)[None, :, :, :width]
