"""Experts with MXFP4 weights and bfloat16 activations on Hopper (compute capability 9.0).

Weights stay packed, in the words of `quire.kernels.weight_only.words`, and become bf16 in registers before tensor cores
multiply them.

Few tokens     each pair (token, chosen expert) by itself, in two kernels: `quire.kernels.weight_only.pairs_alone`
Many tokens    pairs are sorted by expert, and tiles of pairs multiplied: `quire.kernels.weight_only.pairs_in_words`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.experts.triton import _sort, sum_pairs
from quire.kernels.experts.weights import Biases, ExpertWeights, empty_biases
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.kernels.weight_only import pairs_alone, words
from quire.kernels.weight_only import pairs_in_words as products
from quire.kernels.words import product_words

MOST_FEW = 4  # tokens; 0: pairs are always sorted
MOST_ODD = 16  # blocks of 64 outputs up to which an odd number of blocks stays odd: another one would cost too much


@dataclass(frozen=True)
class Stack:
    """The gate_up or down matrices of all E experts: K inputs, N outputs, twice N where gate and up are stacked.

    words     int32 [E, units, K / 64, 32, 4], see `words.repack`; a unit has 16 outputs, and K is padded to 128
    scales    int32 [E, units, ceil(K / 128), 16], see `words.repack_powers`
    outputs   number of outputs N
    """

    words: Tensor
    scales: Tensor
    outputs: int
    gated: bool
    scheme: Scheme


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
    first, second = _empty(num_experts, gate_up, device, True), _empty(num_experts, down, device, False)
    return ExpertWeights(first, second, form.act, *empty_biases(num_experts, gate_up, down, device, form))


def _empty(num_experts: int, one: QuantizedMatrix, device: torch.device, gated: bool) -> Stack:
    (rows, columns), scheme = one.shape, one.scheme
    blocks = -(-rows // 64)
    units, steps = 4 * (blocks + (blocks % 2 if blocks > MOST_ODD else 0)), -(-columns // words.STEP)
    shapes = (units, 2 * steps, 32, 4), (units, steps, 16)
    own, scales = (torch.zeros((num_experts, *shape), dtype=torch.int32, device=device) for shape in shapes)
    return Stack(own, scales, rows >> gated, gated, scheme)


def put(
    packed: Packed, place: int, gate_up: QuantizedMatrix, down: QuantizedMatrix, biases: Biases | None = None
) -> None:
    """Pack the weights of an expert into `packed` at the index `place`. See `quire.kernels.experts`."""
    packed.put_biases(biases, place)
    for stack, one in ((packed.gate_up, gate_up), (packed.down, down)):
        made = words.repack(one.values, one.scheme.bits, stack.gated, e2m1=True)
        scales = words.repack_powers(one.scale, stack.gated)
        stack.words[place, : len(made)].copy_(made, non_blocking=True)
        stack.scales[place, : len(scales)].copy_(scales, non_blocking=True)


def way(x: Tensor, packed: Packed) -> str:
    """Return where the products dequantize weights. See `quire.kernels.experts`."""
    return product_words(packed[0].scheme, "stays packed, widened in registers", "")


def run(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
    join: Callable[[], bool] | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts.

    See `quire.kernels.experts`. The result overwrites a contiguous `residual`.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is None else residual.contiguous()
    x, added = x if x.stride(1) == 1 else x.contiguous(), None if residual is None else y
    if 0 < len(x) <= MOST_FEW and pairs_alone.warps_of(x.shape[1], packed.gate_up.outputs, ids.shape[1]):
        _few(x, pairs_alone.Routed(ids, weights, expert_map), packed, added, y, join)
    elif len(x):
        _many(x, pairs_alone.Routed(ids, weights, expert_map), packed, added, y, join)
    return y


def _few(
    x: Tensor,
    routed: pairs_alone.Routed,
    packed: Packed,
    residual: Tensor | None,
    y: Tensor,
    join: Callable[[], bool] | None,
) -> None:
    """Compute `run` for few tokens and write the result to y. Each pair (token, chosen expert) is computed alone."""
    first, second, act, first_bias, second_bias = packed
    inner = first.outputs
    up = pairs_alone.Matrices(first.words, first.scales, first_bias, x.shape[1])
    down = pairs_alone.Matrices(second.words, second.scales, second_bias, inner)
    pairs_alone.run(x, up, down, act, routed, residual, y, join)


def _many(
    x: Tensor,
    routed: pairs_alone.Routed,
    packed: Packed,
    residual: Tensor | None,
    y: Tensor,
    join: Callable[[], bool] | None,
) -> None:
    """Compute `run` for many tokens and write the result to y. Pairs (token, chosen expert) are sorted by expert."""
    ids, weights, expert_map = routed.ids, routed.weights, routed.expert_map
    first, second, act, first_bias, second_bias = packed
    k, pairs, hidden, group = ids.shape[1], ids.numel(), x.shape[1], first.scheme.block[1]
    order, starts = _sort(ids, expert_map, len(first.words))
    cut = products.tiles_of(pairs, len(first.words) if expert_map is None else len(expert_map), first.outputs * 2)
    given = products.bring(x, order, starts, k, cut)
    h, parts = (torch.empty((pairs, width), dtype=x.dtype, device=x.device) for width in (first.outputs, hidden))
    products.product(given, first.words, first.scales, group, products.Ending(h, act, first_bias))
    given = products.Sorted(h, order, given.tiles, cut)
    products.product(given, second.words, second.scales, group, products.Ending(parts, "", second_bias, weights))
    sum_pairs(parts, ids, expert_map, residual, y, join)
