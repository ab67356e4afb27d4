"""Experts with weights of 4 and 8 bits and 16-bit activations on NVIDIA GPUs.

Pairs (token, chosen expert) are sorted by expert, as in `quire.kernels.experts.triton`. Weights stay packed, in the
tiles of `quire.kernels.weight_only.tiles`, and become bf16 or f16 in registers before tensor cores multiply
them. Floor on an H200: the packed bytes of the hit experts over 4.3 TB/s, or 6 T k I H operations over 780 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.experts.triton import Product, _sort, run_apart, sum_pairs
from quire.kernels.experts.weights import Biases, ExpertWeights, empty_biases
from quire.kernels.lora.routed import ExpertAdapters, Join, Routed
from quire.kernels.pack.matrix import QuantizedMatrix, scale_dtype
from quire.kernels.weight_only.pairs_in_tiles import Stack, Tiles, product, tiles_of
from quire.kernels.weight_only.pairs_in_words import Ending
from quire.kernels.weight_only.tiles import DEEP, ROWS, deep_of, repack
from quire.kernels.words import product_words

Packed = ExpertWeights[Stack]


def empty(
    num_experts: int,
    gate_up: QuantizedMatrix,
    down: QuantizedMatrix,
    device: torch.device,
    form: ExpertForm = PLAIN,
) -> Packed:
    """Allocate the packed weights of `num_experts` experts, each shaped like `gate_up` and `down`.

    See `quire.kernels.experts`.
    """
    second = _empty(num_experts, down, device, 1, down.shape[0])
    first = _empty(num_experts, gate_up, device, 2, second.inputs)
    padded = 2 * first.outputs, second.outputs
    return ExpertWeights(first, second, form.act, *empty_biases(num_experts, gate_up, down, device, form, padded))


def _empty(num_experts: int, one: QuantizedMatrix, device: torch.device, parts: int, outputs: int) -> Stack:
    scheme, group = one.scheme, one.scheme.block[1]
    deep = deep_of(scheme, DEEP[0])
    columns = -(-one.shape[1] // deep) * deep
    scales = num_experts, columns // (group or columns), parts * outputs

    def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Stack(
        zeros(num_experts, parts * -(-outputs // ROWS), columns // deep, ROWS, deep * scheme.bits // 8),
        zeros(*scales, dtype=torch.uint8 if scheme.factor else scale_dtype(scheme)),
        zeros(*scales) if scheme.zeros else None,
        zeros(num_experts, parts * outputs, dtype=torch.float32) if scheme.factor else None,
        zeros(num_experts, columns, dtype=torch.int32) if scheme.order else None,
        parts,
        scheme,
    )


def put(
    packed: Packed, place: int, gate_up: QuantizedMatrix, down: QuantizedMatrix, biases: Biases | None = None
) -> None:
    """Pack the weights of an expert into `packed` at the index `place`. See `quire.kernels.experts`."""
    packed.put_biases(biases, place)
    for stack, one in ((packed.gate_up, gate_up), (packed.down, down)):
        (rows, columns), bits = one.shape, stack.scheme.bits
        more = (stack.inputs - columns) * bits // 8
        tiles = [
            repack(F.pad(part, (0, more, 0, stack.outputs - len(part))), bits, stack.deep)
            for part in one.values.chunk(stack.parts)
        ]
        stack.tiles[place].copy_(torch.cat(tiles), non_blocking=True)
        scale = one.scale.view(torch.uint8) if stack.scheme.factor else one.scale
        beside = (stack.scales, scale), (stack.zeros, one.zero), (stack.factors, one.factor)
        for room, given in beside:
            if room is not None and given is not None:
                own = room[place].view(-1, stack.parts, stack.outputs)[: given.shape[1], :, : rows // stack.parts]
                own.copy_(given.t().unflatten(1, (stack.parts, -1)), non_blocking=True)
        if stack.columns is not None and one.order is not None:
            behind = torch.arange(columns, stack.inputs, device=one.device)
            stack.columns[place].copy_(torch.cat((one.order, behind)), non_blocking=True)


def way(x: Tensor, packed: Packed) -> str:
    """Return where the products dequantize weights. See `quire.kernels.experts`."""
    return product_words(packed[0].scheme, "stays packed, widened in registers", "")


def run_adapted(
    x: Tensor, routed: Routed, packed: Packed, residual: Tensor | None, adapters: ExpertAdapters, *join: Join
) -> Tensor:
    """Compute `run` with adapters. See `quire.kernels.experts`."""
    first, second, act, first_bias, second_bias = packed

    def multiplied(stack: Stack, bias: Tensor | None, width: int) -> Product:
        whole = replace(stack, parts=1)  # gate and up are whole tiles of outputs

        def made(rows: Tensor, order: Tensor, starts: Tensor, scales: Tensor, spread: int) -> Tensor:
            given = F.pad(rows, (0, stack.inputs - rows.shape[1]))
            y = rows.new_empty(len(rows), whole.outputs if stack.parts > 1 else width)
            ending = Ending(y, "", bias, scales)
            product(given, whole, order, starts, scales.shape[1], ending, tiles_of(len(rows), spread))
            return y if y.shape[1] == width else y.unflatten(1, (stack.parts, -1))[..., : adapters.inner].flatten(1)

        return made

    products = multiplied(first, first_bias, 2 * adapters.inner), multiplied(second, second_bias, x.shape[1])
    return run_apart(x, routed, products, act, len(first.tiles), residual, adapters, *join)


def run(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
    join: Callable[[], bool] | None = None,
    cut: Tiles | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts.

    See `quire.kernels.experts`. The result overwrites a contiguous `residual`.

    cut   tiling of both products; None: the number of pairs decides it
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is None else residual.contiguous()
    if not len(x):
        return y
    first, second, act, first_bias, second_bias = packed
    k, pairs, hidden = ids.shape[1], ids.numel(), x.shape[1]
    experts = len(first.tiles)
    order, starts = _sort(ids, expert_map, experts)
    if first.inputs > hidden or x.stride(1) != 1:
        x = F.pad(x, (0, first.inputs - hidden)).contiguous()
    h, parts = (torch.empty((pairs, width), dtype=x.dtype, device=x.device) for width in (second.inputs, hidden))
    cut = cut or tiles_of(pairs, experts if expert_map is None else len(expert_map))
    product(x, first, order, starts, k, Ending(h, act, first_bias), cut)
    product(h, second, order, starts, k, Ending(parts, "", second_bias, weights), cut)
    sum_pairs(parts, ids, expert_map, None if residual is None else y, y, join)
    return y
