"""Steps of multi-head latent attention."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quire.explain.verify.differences import Differences, relative_difference
from quire.explain.verify.recording import on_result, on_sum, whole
from quire.explain.verify.step_kinds.interfaces import Keep, MixerSteps, Parts
from quire.kernels.attention import AttentionMeta, as_list, sequences
from quire.kernels.index import Chosen
from quire.kernels.latent.rows import numbers
from quire.layers.latent import LatentAttention


def _rows(meta: AttentionMeta, chosen: Chosen) -> Tensor:
    """Return the tokens [T, top_k] that each row of a step attends to, ascending; -1 behind the last one."""
    decodes, top_k = chosen.decodes or 0, chosen.positions.shape[1]
    known = iter(chosen.positions[decodes:])
    rows = torch.full((as_list(meta.query_start)[-1], top_k), -1, dtype=torch.int32)
    rows[:decodes] = chosen.positions[:decodes]
    for prompt in sequences(meta):
        first, last, _, past = prompt
        for row in range(max(first, decodes), last):
            seen = past + row - first + 1
            if prompt in chosen.sequences:
                rows[row] = next(known)
            else:
                rows[row, :seen] = torch.arange(seen)
    return rows


class LatentSteps(MixerSteps):
    """The steps of latent attention. A `MixerSteps`."""

    room = "self_attn"
    paths: Mapping[str, tuple[str, ...]] = {}
    inputs: Mapping[str, tuple[str, ...]] = {}
    cached = ("kv_a_layernorm", "keys")

    def watch(self, layer: LatentAttention, keep: Keep, parts: Parts) -> None:
        """Record projections and norms, queries and rotated keys as attention reads them, and chosen tokens."""
        sizes, kernel = layer.sizes, layer.kernel

        def neighbours(x: Tensor) -> Tensor:
            """Return x with its rotary part, which comes last, in interleaved pairs, as in the checkpoint."""
            if not sizes.interleaved:
                return x
            first, second = x[..., -sizes.rope_dim :].chunk(2, -1)
            return torch.cat((x[..., : -sizes.rope_dim], torch.stack((first, second), -1).flatten(-2)), -1)

        def queries(name: str, q: Tensor) -> None:
            keep(name, whole(neighbours(q.unflatten(1, (layer.num_heads, -1))), layer.output.tp))

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
            latents, keys = numbers(cache, (slots // cache.block_size, slots % cache.block_size))
            keep("kv_a_layernorm", latents)
            keep("queries", whole(q, layer.output.tp))
            keep("keys", keys)
            return q

        layer.down.register_forward_hook(projected)
        if layer.indexer is not None:
            layer.indexer.register_forward_hook(lambda module, given, chosen: keep("indexer", _rows(given[3], chosen)))
        if layer.q is not None:
            on_result(layer.q_norm, keep, "q_a_layernorm")
            layer.q.register_forward_hook(lambda module, given, result: queries("q_b_proj", result))
        named = ("project", "absorbed", "chosen", "expanded")  # not all kernels have "chosen"
        others = {name: getattr(kernel, name) for name in named if hasattr(kernel, name)}
        layer.kernel = SimpleNamespace(prepare=prepare, **others)
        on_sum(layer.output, keep, "attention", "o_proj")

    def replace(self, differences: Differences, stage: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Compare queries and the rotated part of keys. Families differ only in the order of the rotated pairs."""
        width = differences.ours.result(stage, "keys").shape[-1]
        found = []
        for step, part in (("queries", q), ("keys", k[:, :1, :, -width:])):
            ours, theirs = differences.ours.result(stage, step), part[0].transpose(0, 1)
            ours = ours.view(theirs.shape)
            first, second = ours[..., -width:].chunk(2, -1)
            pairs = torch.cat((ours[..., :-width], torch.stack((first, second), -1).flatten(-2)), -1)
            orders = [(relative_difference(one.flatten(1), theirs.flatten(1)), one) for one in (ours, pairs)]
            differences.found[stage, step], chosen = min(orders, key=lambda pair: pair[0])
            found.append(chosen.transpose(0, 1)[None])
        k = k.clone()
        k[..., -width:] = found[1]
        return found[0], k, v
