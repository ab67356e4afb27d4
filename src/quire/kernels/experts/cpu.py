"""Experts on a CPU: tokens are grouped by expert, and PyTorch's products read each hit expert once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation.cpu import gated
from quire.kernels.experts import stacked
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.experts.quantized_ref import Pairs, empty_pairs, put_pair, run_pair
from quire.kernels.experts.quantized_ref import way as way
from quire.kernels.experts.ref import placed
from quire.kernels.experts.weights import Biases, ExpertWeights, activated, each_expert, empty_biases
from quire.kernels.lora.routed import Between, ExpertAdapters, Routed
from quire.kernels.native import memory
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.kernels.quantize.ref import quantize_rows as quantize_rows
from quire.kernels.quantize.rows import QuantizedRows

# Each expert's weights, and the memory of all; no memory of all with quantized weights.
Packed = tuple[list[ExpertWeights[Tensor]], stacked.Packed] | Pairs


def empty(
    num_experts: int,
    gate_up: Tensor | QuantizedMatrix,
    down: Tensor | QuantizedMatrix,
    device: torch.device,
    form: ExpertForm = PLAIN,
) -> Packed:
    """Allocate the packed weights of `num_experts` experts. See `quire.kernels.experts`.

    All gate_up weights share one piece of memory, all down weights another: a huge page can hold several experts.
    """
    if isinstance(gate_up, QuantizedMatrix) and isinstance(down, QuantizedMatrix):
        return empty_pairs(num_experts, gate_up, down, device, form)
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "both are quantized, or none"
    first, second = (memory.empty((num_experts, *one.shape), one.dtype) for one in (gate_up, down))
    biases = empty_biases(num_experts, gate_up, down, device, form)
    every = each_expert(list(zip(first, second, strict=True)), biases, form.act)
    return every, ExpertWeights(first, second, form.act, *biases)


def put(
    packed: Packed,
    place: int,
    gate_up: Tensor | QuantizedMatrix,
    down: Tensor | QuantizedMatrix,
    biases: Biases | None = None,
) -> None:
    """Pack the weights of an expert into `packed` at the index `place`. See `quire.kernels.experts`."""
    if isinstance(packed, list):
        put_pair(packed[place], gate_up, down, biases)
    else:
        stacked.put(packed[1], place, gate_up, down, biases)


def destination(packed: Packed) -> tuple[Tensor, Tensor]:
    """Return the memory of all experts' weights (gate_up, down) for a loader to fill. See `quire.kernels.experts`."""
    return stacked.destination(packed[1])


def run(
    x: Tensor | QuantizedRows,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts. See `quire.kernels.experts`."""
    return run_adapted(x, (weights, ids, expert_map), packed, residual, None)


def run_adapted(
    x: Tensor | QuantizedRows,
    routed: Routed,
    packed: Packed,
    residual: Tensor | None,
    adapters: ExpertAdapters | None,
) -> Tensor:
    """Compute `run` with adapters. See `quire.kernels.experts`."""
    if isinstance(packed, list):
        return run_each(x, routed, packed, residual, _quantized, adapters)
    return run_each(x, routed, packed[0], residual, _expert, adapters)


def run_each(
    x: Tensor | QuantizedRows,
    routed: Routed,
    packed: Sequence[ExpertWeights[Any]],
    residual: Tensor | None,
    expert: Callable[..., Tensor],
    adapters: ExpertAdapters | None = None,
    *,
    combine: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute `run`: call the function `expert` for each expert that some token chose.

    packed   packed weights of each expert of this rank
    expert   function (rows [n, H] of x, weights of the expert) -> [n, H] in x's dtype, without routing weights. With
             adapters a third argument adds their products (`Between`)
    combine  function (weights [T, k], outputs [T, k, H]) -> weighted sums [T, H] float32; None: PyTorch's product
    """
    weights, ids, expert_map = routed
    places, order = placed(ids, expert_map).flatten().sort(stable=True)
    counts = torch.bincount(places + 1, minlength=len(packed) + 1).tolist()
    end = counts[0]
    rows, parts = x[order // ids.shape[1]], torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    parts[order[:end]] = 0
    for place, (own, count) in enumerate(zip(packed, counts[1:], strict=True)):
        if count:
            start, end = end, end + count
            pairs = order[start:end]
            between = () if adapters is None else (adapters.of_expert(place, pairs // ids.shape[1]),)
            parts[pairs] = expert(rows[start:end], own, *between)
    parts = parts.view(*ids.shape, x.shape[1])
    y = (weights[:, None] @ parts.float()).squeeze(1) if combine is None else combine(weights, parts)
    return (y if residual is None else y.add_(residual)).to(x.dtype)


def _expert(x: Tensor, own: ExpertWeights[Tensor], between: Between | None = None) -> Tensor:
    inner = F.linear(x, own.gate_up, own.gate_up_bias)
    if between is not None:
        between.add_up(inner, x)
    h = activated(inner, own.act, gated)
    y = F.linear(h, own.down, own.down_bias)
    if between is not None:
        between.add_down(y, h)
    return y


def _quantized(
    x: Tensor | QuantizedRows, own: ExpertWeights[QuantizedMatrix], between: Between | None = None
) -> Tensor:
    return run_pair(x, own, between).to(x.dtype)
