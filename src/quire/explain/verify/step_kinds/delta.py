"""Steps of a recurrent layer with the gated delta rule."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.explain.verify.recording import on_result, on_sum, pieces_of, whole
from quire.explain.verify.step_kinds.interfaces import HalfSteps, Keep, Parts
from quire.layers.delta import GatedDelta

RECURRENCE = "recurrence"
OUTPUT = ("linear_attn.out_proj", "linear_attn.o_proj", "self_attn.o_proj")
APART = ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj")  # of Kimi-Linear, some of OLMo-Hybrid, too
DECAYS = ("f_a_proj", "f_b_proj")  # of Kimi-Linear


class DeltaSteps(HalfSteps):
    """The steps of the gated delta rule. A `HalfSteps`."""

    room = "linear_attn"
    paths: Mapping[str, tuple[str, ...]] = {
        **{step: (f"linear_attn.{step}", f"self_attn.{step}") for step in APART},
        **{step: (f"self_attn.forget_gate.{step}",) for step in DECAYS},
        "out_proj": OUTPUT,
    }
    inputs: Mapping[str, tuple[str, ...]] = {RECURRENCE: OUTPUT}

    def watch(self, layer: GatedDelta, keep: Keep, parts: Parts) -> None:
        """Record the projections as the checkpoint orders their rows, the result of the heads, and their projection."""
        form, tp = layer.form, layer.output.tp
        wide = [form.key_heads * form.key_dim] * 2 + [form.heads * form.value_dim] * 2

        def record(name: str, result: Tensor, sides: list[int]) -> None:
            own = parts[f"delta.{name}.weight"]
            stored = [part.stored.split(".")[-2] for part in own]  # names of modules
            if layer.by_head:
                heads = [part.unflatten(1, (form.key_heads, -1)) for part in result.split(sides, 1)]
                keep(stored[0], whole(torch.cat(heads, -1), tp).flatten(1))
                return
            pieces = pieces_of(result, own, tp)
            for module in dict.fromkeys(stored):
                keep(module, torch.cat([one for one, at in zip(pieces, stored, strict=True) if at == module], 1))

        def projected(module: Any, given: Any, result: Tensor) -> None:
            record("input", result, wide)

        def rated(module: Any, given: Any, result: Tensor) -> None:
            record("rates", result, [form.heads] * 2)

        layer.input.register_forward_hook(projected)
        layer.rates.register_forward_hook(rated)
        if layer.decays is not None and layer.gates is not None:
            on_result(layer.decays, keep, DECAYS[1], tp)
            on_result(layer.gates, keep, "g_b_proj", tp)
        on_sum(layer.output, keep, RECURRENCE, "out_proj")
