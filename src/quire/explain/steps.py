"""Recording of every step of Quire's layers in a running engine, under the names that Hugging Face gives to the steps.

Wraps the modules of an assembled model in float32 on a CPU, where no kernel joins a norm and a projection. Knows how
layers order their rows; knows nothing of the reference. A watched model serves no requests afterwards.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quire.kernels.attention import KVView
from quire.layers.context import StepContext
from quire.layers.decoder import Decoder
from quire.layers.latent import LatentAttention
from quire.layers.moe import MoE
from quire.plan.kinds.interfaces import head_order

ATTENTION, FEED_FORWARD = "attention", "feed-forward"  # the two halves of a layer


class Recording:
    """Results of the operations of a model, `pieces[stage][step]`, in the order in which they are computed.

    stage    "embed", a half of a layer ("layer 3 attention"), "norm" or "logits"
    step     an operation of the stage, such as "q_proj"
    A piece is the result [T, ...] in a single engine step; `result` joins the pieces.
    """

    def __init__(self) -> None:
        self.pieces: dict[str, dict[str, list[Tensor]]] = {}

    def keep(self, stage: str, step: str, result: Tensor) -> None:
        """Add a copy of the result of `step` in the next engine step. It is a copy, because kernels reuse memory."""
        self.pieces.setdefault(stage, {}).setdefault(step, []).append(result.detach().clone())

    def result(self, stage: str, step: str) -> Tensor:
        """Return the result [T, ...] for all tokens, in their order."""
        return torch.cat(self.pieces[stage][step])


def watch(model: Decoder, recording: Recording) -> None:
    """Record every operation in the layers of `model` from now on, but not the output of whole layers.

    A `HiddenTap` of the worker gets that output. Afterwards the model must serve no other requests.
    """
    block: Any
    for index, block in enumerate(model.layers):
        keep: Any = partial(recording.keep, stage_name(index, ATTENTION))
        _on_result(block.attention_norm, keep, "input_layernorm")
        if isinstance(block.attention, LatentAttention):
            _watch_latent(block.attention, keep)
        else:
            _watch_heads(block.attention, keep, block.attention.rotary_dim)
        _on_sum(block.attention.output, keep, "attention", "o_proj")
        _on_result(block.attention, keep, "sum")
        keep = partial(recording.keep, stage_name(index, FEED_FORWARD))
        _on_result(block.mlp_norm, keep, "post_attention_layernorm")
        if isinstance(block.mlp, MoE):
            _watch_experts(block.mlp, keep)
        else:
            _on_sum(block.mlp.down, keep, "gate_proj, up_proj", "down_proj")


def stage_name(layer: int, half: str) -> str:
    """Return the name of a half of a layer, such as "layer 3 attention"."""
    return f"layer {layer} {half}"


def _on_result(module: Any, keep: Any, step: str) -> None:
    module.register_forward_hook(lambda module, given, result: keep(step, result))


def _on_sum(linear: Any, keep: Any, given: str, step: str) -> None:
    """Record the input of a projection, and its product without the residual."""
    add = linear.add

    def tapped(x: Tensor, residual: Tensor, ctx: StepContext) -> Tensor:
        keep(given, x)
        keep(step, add(x.clone(), torch.zeros_like(residual), ctx))
        result: Tensor = add(x, residual, ctx)
        return result

    linear.add = tapped


def _watch_heads(layer: Any, keep: Any, rotary_dim: int) -> None:
    """Record projections, norms of heads, and queries, keys and values as attention reads them."""
    heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
    plain = torch.tensor(head_order(rotary_dim, width) or range(width)).argsort()
    kernel = layer.kernels.heads

    def projected(module: Any, given: Any, result: Tensor) -> None:
        q, k, v = result.view(len(result), -1, width).split([heads, kv_heads, kv_heads], 1)
        for name, part in {"q_proj": q[..., plain], "k_proj": k[..., plain], "v_proj": v}.items():
            keep(name, part)

    def prepare(qkv: Tensor, norm: Tensor | None, eps: float, *rest: Any) -> Tensor:
        cos, sin, kv, slots = rest
        if norm is not None:
            places, shape = torch.arange(len(qkv)), (len(qkv), kv_heads, 1, width)
            scratch = KVView(qkv.new_zeros(shape), qkv.new_zeros(shape))
            unturned = torch.ones_like(cos), torch.zeros_like(sin)
            keep("q_norm", kernel.prepare(qkv.clone(), norm, eps, *unturned, scratch, places)[..., plain])
            keep("k_norm", scratch.k[:, :, 0][..., plain])
        q: Tensor = kernel.prepare(qkv, norm, eps, cos, sin, kv, slots)
        block, offset = slots // kv.block_size, slots % kv.block_size
        keep("queries", q[..., plain])
        keep("keys", kv.k[block, :, offset][..., plain])
        keep("values", kv.v[block, :, offset])
        return q

    layer.qkv.register_forward_hook(projected)
    layer.kernels = replace(layer.kernels, heads=SimpleNamespace(prepare=prepare))


def _watch_latent(layer: LatentAttention, keep: Any) -> None:
    """Record projections and norms, and queries and rotated keys as attention reads them."""
    sizes, kernel = layer.sizes, layer.kernel

    def neighbours(x: Tensor) -> Tensor:
        """Return x with the rotary part (the end of its last dimension) in interleaved pairs, as in the checkpoint."""
        if not sizes.interleaved:
            return x
        first, second = x[..., -sizes.rope_dim :].chunk(2, -1)
        return torch.cat((x[..., : -sizes.rope_dim], torch.stack((first, second), -1).flatten(-2)), -1)

    def queries(name: str, q: Tensor) -> None:
        keep(name, neighbours(q.unflatten(1, (layer.num_heads, -1))))

    def projected(module: Any, given: Any, result: Tensor) -> None:
        q, latent = result[:, : -(sizes.kv_rank + sizes.rope_dim)], result[:, -(sizes.kv_rank + sizes.rope_dim) :]
        if layer.q is None:
            queries("q_proj", q)
        else:
            keep("q_a_proj", q)
        keep("kv_a_proj_with_mqa", neighbours(latent))

    def prepare(q: Tensor, kv: Tensor, norm: Tensor, eps: float, *rest: Any) -> Tensor:
        *_, cache, slots = rest
        q = kernel.prepare(q, kv, norm, eps, *rest)
        block, offset = slots // cache.block_size, slots % cache.block_size
        keep("kv_a_layernorm", cache.latent[block, 0, offset])
        keep("queries", q)
        keep("keys", cache.rope[block, 0, offset])
        return q

    layer.down.register_forward_hook(projected)
    if layer.q is not None:
        _on_result(layer.q_norm, keep, "q_a_layernorm")
        layer.q.register_forward_hook(lambda module, given, result: queries("q_b_proj", result))
    others = {name: getattr(kernel, name) for name in ("project", "absorbed", "expanded")}
    layer.kernel = SimpleNamespace(prepare=prepare, **others)


def _watch_experts(layer: MoE, keep: Any) -> None:
    """Record the router's weights [T, E], the shared experts, and the sum of the routed experts."""
    experts = layer.router.routing.num_experts

    def routed(weights: Tensor, ids: Tensor) -> None:
        keep("router", weights.new_zeros(len(ids), experts).scatter_(1, ids.long(), weights))

    def summed(module: Any, given: Any, result: Tensor) -> None:
        x, weights, ids, residual = given
        keep("experts", module.forward(x, weights, ids, torch.zeros_like(residual)))

    layer.on_routing = routed
    layer.experts.register_forward_hook(summed)
    if layer.shared_gate is not None:
        _on_result(layer.shared_gate, keep, "shared_expert_gate")
    if layer.shared is not None:
        _watch_shared(layer.shared, keep)


def _watch_shared(shared: Any, keep: Any) -> None:
    """Record the shared expert before a gate scales it: the gate is a step of its own."""
    add = shared.down.add
    inner: list[Tensor] = []

    def projected(module: Any, given: Any, result: Tensor) -> None:
        inner[:] = [result]
        keep("shared gate_proj, up_proj", result)

    def tapped(x: Tensor, residual: Tensor, ctx: StepContext) -> Tensor:
        keep("shared down_proj", add(inner[0].clone(), torch.zeros_like(residual), ctx))
        result: Tensor = add(x, residual, ctx)
        return result

    shared.gate_up.register_forward_hook(projected)
    shared.down.add = tapped
