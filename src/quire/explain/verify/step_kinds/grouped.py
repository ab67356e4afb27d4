"""Steps of grouped-query attention."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quire.explain.verify.differences import Differences
from quire.explain.verify.recording import on_sum, whole
from quire.explain.verify.step_kinds.interfaces import Keep, MixerSteps, Parts
from quire.kernels.attention import KVView
from quire.kernels.attention.eight_bits import gather
from quire.layers.attention import Attention
from quire.plan.kinds.interfaces import head_order

GATED = "attention times its gate"


class GroupedSteps(MixerSteps):
    """The steps of grouped-query attention. A `MixerSteps`."""

    room = "self_attn"
    paths: Mapping[str, tuple[str, ...]] = {  # of LFM2 and of Nemotron-H, too
        "o_proj": ("self_attn.o_proj", "self_attn.out_proj", "mixer.o_proj"),
        **{f"{side}_norm": (f"self_attn.{side}_norm", f"self_attn.{side}_layernorm") for side in "qk"},
        **{f"{side}_proj": (f"self_attn.{side}_proj", f"mixer.{side}_proj") for side in "qkv"},
    }
    inputs: Mapping[str, tuple[str, ...]] = {GATED: ("self_attn.o_proj",)}
    cached = ("keys", "values")

    def watch(self, layer: Attention, keep: Keep, parts: Parts) -> None:
        """Record projections, norms of heads, and queries, keys and values as attention reads them."""
        heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
        order = head_order(layer.rotary_dim, width, interleaved=layer.interleaved) or range(width)
        plain = torch.tensor(order, device=layer.qkv.device).argsort()
        kernel, sizes = layer.kernels.heads, {"q": heads, "k": kv_heads, "v": kv_heads}
        starts = {part.name: part.start for part in (*parts["kept"], *parts["attention.qkv.weight"])}

        def share(step: str, own: Tensor) -> None:
            """Record a step [T, heads, width] of all ranks. Ranks may have copies of KV heads."""
            side = "q" if step == "queries" else step[0]
            keep(step, whole(own, layer.output.tp, starts.get("k" if side == "v" else side)))

        def projected(module: Any, given: Any, result: Tensor) -> None:
            by_head, gates = result.view(len(result), -1, width), list[Tensor]()
            if layer.gated:
                by_head, *gates = by_head.split([by_head.shape[1] - heads, heads], 1)
            sides = zip(layer.projected, by_head.split([sizes[side] for side in layer.projected], 1), strict=True)
            for side, part in sides:
                own = part if side == "v" else part[..., plain]
                share(f"{side}_proj", torch.cat((own, *gates), -1) if side == "q" else own)

        def prepare(qkv: Tensor, norm: Tensor | None, eps: float, *rest: Any) -> Tensor:
            cos, sin, kv, slots, values = rest
            if norm is not None and layer.ones is None:  # one without weights comes after the rotation in transformers
                places, shape = torch.arange(len(qkv), device=qkv.device), (len(qkv), kv_heads, 1, width)
                scratch = KVView(qkv.new_zeros(shape), qkv.new_zeros(shape))
                unturned = torch.ones_like(cos), torch.zeros_like(sin)
                share("q_norm", kernel.prepare(qkv.clone(), norm, eps, *unturned, scratch, places, values)[..., plain])
                if kv_heads:
                    share("k_norm", scratch.k[:, :, 0][..., plain])
                if values in ("normed", "keys"):
                    share("v_norm", scratch.v[:, :, 0])
            q: Tensor = kernel.prepare(qkv, norm, eps, cos, sin, kv, slots, values)
            at = slots // kv.block_size, slice(None), slots % kv.block_size
            if layer.growth is None:
                share("queries", q[..., plain])
            share("keys", (gather(kv.k, at).float() * kv.k_scale)[..., plain])
            share("values", gather(kv.v, at).float() * kv.v_scale)
            return q

        layer.qkv.register_forward_hook(projected)

        def opened(joined: Tensor, gates: Tensor) -> Tensor:
            keep("attention", whole(joined, layer.output.tp))
            found: Tensor = activation.opened(joined, gates)
            return found

        activation = layer.kernels.activation
        gate = SimpleNamespace(opened=opened)
        layer.kernels = replace(layer.kernels, heads=SimpleNamespace(prepare=prepare), activation=gate)
        if layer.growth is not None:
            layer.growth.register_forward_hook(lambda module, given, result: share("queries", result[..., plain]))
        on_sum(layer.output, keep, GATED if layer.gated else "attention", "o_proj")

    def replace(self, differences: Differences, stage: str, *parts: Tensor) -> Iterator[Tensor]:
        """Compare queries, keys and values [1, H, T, D], and yield Quire's."""
        for step, part in zip(("queries", "keys", "values"), parts, strict=True):
            yield differences.replace(stage, step, part.transpose(1, 2)).transpose(1, 2)
