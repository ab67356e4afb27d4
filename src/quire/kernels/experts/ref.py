"""Experts one after the other, in float32."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.kernels.activation.ref import gated
from quire.kernels.experts import stacked
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.experts.quantized_ref import Pairs, empty_pairs, put_pair, run_pair
from quire.kernels.experts.quantized_ref import way as way
from quire.kernels.experts.stacked import destination as destination
from quire.kernels.experts.weights import Biases, activated
from quire.kernels.lora.routed import ExpertAdapters, Routed
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.kernels.quantize.ref import quantize_rows as quantize_rows
from quire.kernels.quantize.rows import QuantizedRows

Packed = stacked.Packed | Pairs


def empty(
    num_experts: int,
    gate_up: Tensor | QuantizedMatrix,
    down: Tensor | QuantizedMatrix,
    device: torch.device,
    form: ExpertForm = PLAIN,
) -> Packed:
    """Allocate the packed weights of `num_experts` experts, each shaped like `gate_up` and `down`.

    See `quire.kernels.experts`.
    """
    if isinstance(gate_up, QuantizedMatrix) and isinstance(down, QuantizedMatrix):
        return empty_pairs(num_experts, gate_up, down, device, form)
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "both are quantized, or none"
    return stacked.empty(num_experts, gate_up, down, device, form)


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
        stacked.put(packed, place, gate_up, down, biases)


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
    weights, ids, expert_map = routed
    places = placed(ids, expert_map)
    y = torch.zeros(x.shape, device=x.device) if residual is None else residual.float()
    for place, result in enumerate(_results(x, packed, adapters)):
        y = y + (weights * (places == place)).sum(1, keepdim=True) * result
    return y.to(x.dtype)


def _results(x: Tensor | QuantizedRows, packed: Packed, adapters: ExpertAdapters | None) -> Iterator[Tensor]:
    """Yield the result of each expert for all rows, [T, H] float32."""
    for place in range(len(packed) if isinstance(packed, list) else len(packed.gate_up)):
        between = None if adapters is None else adapters.of_expert(place, None)
        if isinstance(packed, list):
            yield run_pair(x, packed[place], between)
            continue
        gate_up, down, act, first, second = packed
        assert isinstance(x, Tensor), "rows are quantized for quantized weights alone"
        inner = x.float() @ gate_up[place].float().t()
        inner = inner if first is None else inner + first[place].float()
        if between is not None:
            between.add_up(inner, x)
        h = activated(inner, act, gated)
        y = h @ down[place].float().t()
        y = y if second is None else y + second[place].float()
        if between is not None:
            between.add_down(y, h)
        yield y


def placed(ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Map the expert numbers `ids` to indices of this rank's experts; -1 for an expert of another rank."""
    if expert_map is None:
        return ids
    return torch.where(ids < 0, -1, expert_map[ids.clamp(min=0)])
