"""Steps of grouped-query attention."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quire.explain.verify.differences import Differences
from quire.explain.verify.recording import on_sum
from quire.explain.verify.step_kinds.interfaces import Keep
from quire.kernels.attention import KVView
from quire.layers.attention import Attention
from quire.plan.kinds.interfaces import head_order

GATED = "attention times its gate"


class GroupedSteps:
    """The steps of grouped-query attention. A `MixerSteps`."""

    room = "self_attn"
    paths: Mapping[str, tuple[str, ...]] = {  # of LFM2 and of Nemotron-H, too
        "o_proj": ("self_attn.o_proj", "self_attn.out_proj", "mixer.o_proj"),
        **{f"{side}_norm": (f"self_attn.{side}_norm", f"self_attn.{side}_layernorm") for side in "qk"},
        **{f"{side}_proj": (f"self_attn.{side}_proj", f"mixer.{side}_proj") for side in "qkv"},
    }
    inputs: Mapping[str, tuple[str, ...]] = {GATED: ("self_attn.o_proj",)}

    def watch(self, layer: Attention, keep: Keep) -> None:
        """Record projections, norms of heads, and queries, keys and values as attention reads them."""
        heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
        plain = torch.tensor(
            head_order(layer.rotary_dim, width, interleaved=layer.interleaved) or range(width)
        ).argsort()
        kernel, sizes = layer.kernels.heads, {"q": heads, "k": kv_heads, "v": kv_heads}

        def projected(module: Any, given: Any, result: Tensor) -> None:
            by_head, gates = result.view(len(result), -1, width), list[Tensor]()
            if layer.gated:
                by_head, *gates = by_head.split([by_head.shape[1] - heads, heads], 1)
            parts = by_head.split([sizes[side] for side in layer.projected], 1)
            for side, part in zip(layer.projected, parts, strict=True):
                own = part if side == "v" else part[..., plain]
                keep(f"{side}_proj", torch.cat((own, *gates), -1) if side == "q" else own)

        def prepare(qkv: Tensor, norm: Tensor | None, eps: float, *rest: Any) -> Tensor:
            cos, sin, kv, slots, values = rest
            if norm is not None and layer.ones is None:  # one without weights comes after the rotation in transformers
                places, shape = torch.arange(len(qkv)), (len(qkv), kv_heads, 1, width)
                scratch = KVView(qkv.new_zeros(shape), qkv.new_zeros(shape))
                unturned = torch.ones_like(cos), torch.zeros_like(sin)
                keep("q_norm", kernel.prepare(qkv.clone(), norm, eps, *unturned, scratch, places, values)[..., plain])
                if kv_heads:
                    keep("k_norm", scratch.k[:, :, 0][..., plain])
                if values in ("normed", "keys"):
                    keep("v_norm", scratch.v[:, :, 0])
            q: Tensor = kernel.prepare(qkv, norm, eps, cos, sin, kv, slots, values)
            block, offset = slots // kv.block_size, slots % kv.block_size
            if layer.growth is None:
                keep("queries", q[..., plain])
            keep("keys", kv.k[block, :, offset][..., plain])
            keep("values", kv.v[block, :, offset])
            return q

        layer.qkv.register_forward_hook(projected)

        def opened(joined: Tensor, gates: Tensor) -> Tensor:
            keep("attention", joined)
            found: Tensor = activation.opened(joined, gates)
            return found

        activation = layer.kernels.activation
        gate = SimpleNamespace(opened=opened)
        layer.kernels = replace(layer.kernels, heads=SimpleNamespace(prepare=prepare), activation=gate)
        if layer.growth is not None:
            layer.growth.register_forward_hook(lambda module, given, result: keep("queries", result[..., plain]))
        on_sum(layer.output, keep, GATED if layer.gated else "attention", "o_proj")

    def replace(self, differences: Differences, stage: str, *parts: Tensor) -> Iterator[Tensor]:
        """Compare queries, keys and values [1, H, T, D], and yield Quire's."""
        for step, part in zip(("queries", "keys", "values"), parts, strict=True):
            yield differences.replace(stage, step, part.transpose(1, 2)).transpose(1, 2)
