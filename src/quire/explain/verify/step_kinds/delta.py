"""Steps of a recurrent layer with the gated delta rule."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.explain.verify.recording import on_sum
from quire.explain.verify.step_kinds.interfaces import Keep
from quire.layers.delta import GatedDelta

RECURRENCE = "recurrence"


class DeltaSteps:
    """The steps of the gated delta rule. A `HalfSteps`."""

    room = "linear_attn"
    paths: Mapping[str, tuple[str, ...]] = {}
    inputs: Mapping[str, tuple[str, ...]] = {RECURRENCE: ("linear_attn.out_proj",)}

    def watch(self, layer: GatedDelta, keep: Keep) -> None:
        """Record the projections as the checkpoint orders their rows, the result of the heads, and their projection."""
        form = layer.form
        widths = [form.key_heads * form.key_dim] * 2 + [form.heads * form.value_dim] * 2

        def record(names: tuple[str, ...], result: Tensor, sides: list[int]) -> None:
            if layer.by_head:
                parts = [part.unflatten(1, (form.key_heads, -1)) for part in result.split(sides, 1)]
                keep(names[0], torch.cat(parts, -1).flatten(1))
                return
            for name, part in zip(names[1:], result.split([sum(sides[:-1]), sides[-1]], 1), strict=True):
                keep(name, part)

        def projected(module: Any, given: Any, result: Tensor) -> None:
            record(("in_proj_qkvz", "in_proj_qkv", "in_proj_z"), result, widths)

        def rated(module: Any, given: Any, result: Tensor) -> None:
            record(("in_proj_ba", "in_proj_b", "in_proj_a"), result, [form.heads] * 2)

        layer.input.register_forward_hook(projected)
        layer.rates.register_forward_hook(rated)
        on_sum(layer.output, keep, RECURRENCE, "out_proj")
