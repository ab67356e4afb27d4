"""Experts with 8-bit weights and activations on NVIDIA GPUs: FP8 in blocks or channels, and INT8.

As `quire.kernels.experts.triton`, with quantized rows: for many tokens x is quantized once per token; the rows between
the two products are quantized where they are computed (scales by 128 columns), or after the first product (scales by
row). Sums of 128 products are multiplied by their scales and added in float32.

The kernels read sizes in parts of 128: weights of other sizes are packed with zeros behind their rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import pdl, triton_runtime
from quire.kernels.activation.triton import gated_of
from quire.kernels.experts import scaled_hopper
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.experts.scaled_stack import Packed, Stack
from quire.kernels.experts.triton import Product, _find_tile, _place, _sort, run_apart, sum_pairs
from quire.kernels.experts.weights import Biases, ExpertWeights, empty_biases
from quire.kernels.linear.gemv import bucket
from quire.kernels.linear.scaled import RULES
from quire.kernels.lora.routed import ExpertAdapters, Join, Routed
from quire.kernels.one_row import experts as one_row
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.kernels.quantize.rows import QuantizedRows
from quire.kernels.quantize.triton import (
    FIXED,
    GROUP,
    magnitude,
    quantize,
    quantized,
    scale_of,
    scaled_sums,
    tile_scales,
    to_eight_bits,
)
from quire.kernels.quantize.triton import quantize_rows as quantize_rows
from quire.kernels.triton_runtime import INTERPRETED, jit, tl
from quire.kernels.words import product_words

MOST_FEW = 1  # tokens
UP, DOWN = (4, 8, 396), (2, 8, 264)  # of few tokens: outputs at a time, warps, programs of all pairs or tokens
MOST_SMALL = 32  # up to so many pairs per expert in the mean, this file's products run on Hopper, too
BAND = 8  # tiles of pairs that run side by side through the same columns of weights, which are then read once


@dataclass(frozen=True)
class Tiles:
    """The tiling of a product of the expert MLP.

    rows     pairs (token, chosen expert) of a tile
    cols     outputs of a tile
    stages   iterations in flight (num_stages of Triton)
    """

    rows: int
    cols: int
    warps: int
    stages: int


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
    first, second = _empty(num_experts, gate_up, device, 2), _empty(num_experts, down, device, 1)
    padded = first.values.shape[1], second.values.shape[1]
    return ExpertWeights(first, second, form.act, *empty_biases(num_experts, gate_up, down, device, form, padded))


def _empty(num_experts: int, one: QuantizedMatrix, device: torch.device, parts: int) -> Stack:
    """Allocate the stack of matrices like `one`. parts: 2 of gate and up, each of which is padded by itself."""
    scheme, block = one.scheme, one.scheme.block[0] if one.scheme.kind == "fp8 block" else 0
    rows, columns = parts * whole_groups(one.shape[0] // parts), whole_groups(one.shape[1])
    assert parts == 1 or one.shape[0] // parts % max(block, 1) == 0, "a block has rows of gate and of up"
    make = torch.empty if (rows, columns) == one.shape else torch.zeros
    scales = (rows // block, columns // GROUP) if block else (rows,)
    return Stack(
        make((num_experts, rows, columns), dtype=one.values.dtype, device=device),
        make((num_experts, *scales), dtype=torch.float32, device=device),
        block,
        RULES[scheme.inputs],
        scheme.ue8m0,
        torch.empty(num_experts, device=device) if scheme.inputs == "tensor" else None,
        scheme,
    )


def whole_groups(size: int) -> int:
    """Return the least multiple of 128 that is not below `size`."""
    return -(-size // GROUP) * GROUP


def put(
    packed: Packed, place: int, gate_up: QuantizedMatrix, down: QuantizedMatrix, biases: Biases | None = None
) -> None:
    """Pack the weights of an expert into `packed` at the index `place`. See `quire.kernels.experts`."""
    packed.put_biases(biases, place)
    for stack, one, parts in ((packed.gate_up, gate_up, 2), (packed.down, down, 1)):
        scale = one.scale if stack.block else one.scale.squeeze(1)
        for room, given in ((stack.values[place], one.values), (stack.scales[place], scale)):
            given = given.unflatten(0, (parts, -1))
            room = room.unflatten(0, (parts, -1))[:, : given.shape[1]]
            (room[..., : given.shape[2]] if given.dim() == 3 else room).copy_(given, non_blocking=True)
        if stack.fixed is not None:
            assert one.input_scale is not None
            stack.fixed[place].copy_(one.input_scale, non_blocking=True)


def way(x: Tensor, packed: Packed) -> str:
    """Return where the products dequantize weights and quantize x. See `quire.kernels.experts`."""
    if len(x) <= MOST_FEW:
        return product_words(packed[0].scheme, "stays packed, widened in registers", "in the kernels of the products")
    return product_words(
        packed[0].scheme,
        "stays packed, multiplied in 8 bits by tensor cores",
        "x by a kernel before, the inner rows by that of the first product or after it",
    )


def tiles(pairs: int, experts: int, gated: bool) -> Tiles:
    """Return the tiling of gate and up (`gated`) or of down, by the mean number of pairs (token, expert) per expert."""
    mean = pairs / experts
    if mean <= 8:
        return Tiles(16, 128, 4, 3 if gated else 4)
    if mean <= 80:
        return Tiles(32, 128, 4, 3 if gated else 4)
    return Tiles(64, 128, 8, 3) if gated else Tiles(64, 64, 4, 4)


def run(
    x: Tensor | QuantizedRows,
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
    columns = x.shape[1]
    if more := whole_groups(columns) - columns:  # the weights have zeros there
        if join is not None:
            join()
        residual = None if residual is None else F.pad(residual, (0, more))
        return run(_wider(x, more), weights, ids, packed, expert_map, residual)[:, :columns].contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is None else residual.contiguous()
    given = weights, ids, packed, expert_map, None if residual is None else y, y
    if isinstance(x, Tensor) and x.stride(1) != 1:
        x = x.contiguous()
    if isinstance(x, Tensor) and len(x) <= MOST_FEW:
        alone = len(x) == 1 and expert_map is None
        if len(x) and not (alone and one_row.run(x, (ids, weights), packed, given[4], y, join)):
            few(x, *given, join=join)
    elif len(x):
        many(x, *given, join=join)
    return y


def run_adapted(
    x: Tensor, routed: Routed, packed: Packed, residual: Tensor | None, adapters: ExpertAdapters, *join: Join
) -> Tensor:
    """Compute `run` with adapters. See `quire.kernels.experts`."""
    first, second, act, first_bias, second_bias = packed

    def multiplied(stack: Stack, bias: Tensor | None, parts: int, width: int) -> Product:
        def product(rows: Tensor, order: Tensor, starts: Tensor, scales: Tensor, spread: int) -> Tensor:
            pairs, (_, outputs, inputs) = len(rows), stack.values.shape
            given = _rows(F.pad(rows, (0, inputs - rows.shape[1])), stack)
            y = rows.new_empty(pairs, outputs)
            cut = tiles(pairs, spread, False)
            _product(given, stack, bias, order, starts, scales.shape[1], scales, y, None, False, "", cut)
            return y if outputs == width else y.unflatten(1, (parts, -1))[..., : width // parts].flatten(1)

        return product

    products = (
        multiplied(first, first_bias, 2, 2 * adapters.inner),
        multiplied(second, second_bias, 1, x.shape[1]),
    )
    return run_apart(x, routed, products, act, len(first.values), residual, adapters, *join)


def _wider(x: Tensor | QuantizedRows, more: int) -> Tensor | QuantizedRows:
    """Return x with `more` columns of zeros."""
    if isinstance(x, Tensor):
        return F.pad(x, (0, more))
    return replace(x, values=F.pad(x.values.view(torch.uint8), (0, more)).view(x.values.dtype))


def few(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    join: Callable[[], bool] | None = None,
) -> None:
    """Compute `run` for few tokens and write the result to y. Each pair (token, chosen expert) is computed alone."""
    first, second, act, first_bias, second_bias = packed
    (tokens, k), in_pdl = ids.shape, pdl.in_use()
    (_, hidden, inner), across = second.values.shape, bucket(k)
    h = x.new_empty(tokens * k, inner)
    (cols, warps, programs), deep = UP, bucket(hidden)
    blocks = -(-inner // cols)
    steps = -(-blocks * tokens * k // programs)
    _few_up_kernel[(tokens * k, -(-blocks // steps))](
        x,
        _words(first.values),
        first.scales,
        first.fixed,
        first_bias,
        ids,
        expert_map,
        h,
        x.stride(0),
        k,
        inner,
        hidden,
        cols,
        deep,
        steps,
        first.block,
        first.rule,
        first.powers,
        first.most,
        act,
        not INTERPRETED,
        in_pdl,
        num_warps=warps,
        **pdl.options(in_pdl),
    )
    (cols, warps, programs), deep = DOWN, bucket(inner)
    blocks = -(-hidden // cols)
    steps = -(-blocks * tokens // programs)
    in_pdl = not (join and join()) and in_pdl
    _few_down_kernel[(tokens, -(-blocks // steps))](
        h,
        _words(second.values),
        second.scales,
        second.fixed,
        second_bias,
        ids,
        expert_map,
        weights,
        residual,
        y,
        k,
        across,
        hidden,
        inner,
        cols,
        deep,
        steps,
        second.block,
        second.rule,
        second.powers,
        second.most,
        not INTERPRETED,
        in_pdl,
        num_warps=warps,
        **pdl.options(in_pdl),
    )


def _words(values: Tensor) -> Tensor:
    """Return the same memory in words of four numbers; in the interpreter the values."""
    return values if INTERPRETED else values.view(torch.int32)


def many(
    x: Tensor | QuantizedRows,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    join: Callable[[], bool] | None = None,
    cut: tuple[Tiles, Tiles] | None = None,
) -> None:
    """Compute `run` for many tokens and write the result to y. Pairs (token, chosen expert) are sorted by expert.

    cut   tilings of the two products (gate and up; down); None: the number of pairs decides them
    """
    first, second, pairs = packed.gate_up, packed.down, ids.numel()
    experts, hidden, inner = second.values.shape
    spread = experts if expert_map is None else len(expert_map)
    order, starts = _sort(ids, expert_map, experts)
    given, parts = _rows(x, first), torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    if cut is None and pairs > MOST_SMALL * spread and in_gluon(packed):
        scaled_hopper.products(given, packed, order, starts, weights, parts)
    else:
        cut = cut or (tiles(pairs, spread, True), tiles(pairs, spread, False))
        products(given, packed, order, starts, weights, parts, cut)
    sum_pairs(parts, ids, expert_map, residual, y, join)


def in_gluon(packed: Packed) -> bool:
    """Return True if the kernels of `scaled_hopper` can run these experts: FP8 in blocks of 128 x 128, on Hopper.

    They have no registers for biases.
    """
    blocks = all(one.block == one.rule == GROUP for one in (packed.gate_up, packed.down))
    return blocks and not packed.form.biased and not triton_runtime.missing_hopper()


def products(
    given: tuple[Tensor, Tensor | None],
    packed: Packed,
    order: Tensor,
    starts: Tensor,
    weights: Tensor,
    parts: Tensor,
    cut: tuple[Tiles, Tiles],
) -> None:
    """Compute the expert MLPs of all pairs (token, chosen expert) in two products, and write them to `parts`.

    given   rows of x by token, and their scales; scales None: x is not quantized
    cut     tilings of the first product (gate and up) and of the second (down)

    Other arguments as in `scaled_hopper.products`.
    """
    first, second, act, first_bias, second_bias = packed
    pairs, inner, k = len(order), second.values.shape[2], weights.shape[1]
    fused = second.rule == GROUP
    h = torch.empty((pairs, inner), dtype=second.values.dtype if fused else parts.dtype, device=parts.device)
    h_scales = torch.empty((inner // GROUP, pairs), dtype=torch.float32, device=parts.device) if fused else None
    _product(given, first, first_bias, order, starts, k, None, h, h_scales, second.powers, act, cut[0])
    rows = (h, h_scales) if fused else _rows(h, second)
    _product(rows, second, second_bias, order, starts, k, weights, parts, None, False, "", cut[1])


def _rows(x: Tensor | QuantizedRows, stack: Stack) -> tuple[Tensor, Tensor | None]:
    """Quantized rows and their scales. With a scale per expert, the product quantizes, and rows stay as they are."""
    if isinstance(x, QuantizedRows):
        scales = x.scales.t()
        return x.values, scales if scales.stride(1) == 1 else scales.contiguous()
    if stack.rule == FIXED:
        return x, None
    return quantize(x, stack.rule, stack.values.dtype, powers=stack.powers)


def _product(
    given: tuple[Tensor, Tensor | None],
    stack: Stack,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    k: int,
    weights: Tensor | None,
    y: Tensor,
    y_scales: Tensor | None,
    powers: bool,
    act: str,
    cut: Tiles,
) -> None:
    in_pdl, pairs = pdl.in_use(), len(order)
    (experts, _, depth), width = stack.values.shape, y.shape[1]
    most = (pairs + min(experts, pairs) * (cut.rows - 1)) // cut.rows  # tiles of pairs
    x, scales = given
    _product_kernel[(most * -(-width // cut.cols),)](
        x,
        scales,
        stack.fixed,
        stack.values,
        stack.scales,
        bias,
        order,
        starts,
        weights,
        y,
        y_scales,
        x.stride(0),
        0 if scales is None or not stack.block else scales.stride(0),
        0 if y_scales is None else y_scales.stride(0),
        k,
        experts,
        bucket(experts),
        width,
        depth,
        cut.rows,
        cut.cols,
        stack.block,
        stack.most,
        powers,
        act,
        BAND,
        cut.stages,
        in_pdl,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **pdl.options(in_pdl),
    )


@jit
def _sums(
    tile,
    given,
    scale,
    J: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Return `scaled_sums` [J, BLOCK_N], also times scales of channels."""
    out = scaled_sums(tile, given, scale, J, BLOCK_N, BLOCK_K, BLOCK, MOST, WORDS)
    if BLOCK == 0:
        out *= tl.reshape(scale, [J, BLOCK_N])
    return out


@jit
def _few_up_kernel(
    x,
    gate_up,
    scales,
    fixed,
    bias,
    ids,
    expert_map,
    h,
    stride,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    RULE: tl.constexpr,
    POWERS: tl.constexpr,
    MOST: tl.constexpr,
    ACT: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The activation of STEPS times BLOCK_N outputs of a pair. Grid (pairs, ceil(N / (STEPS BLOCK_N))).

    x                  [T, K] bf16 or f16;  stride  elements from token to token
    gate_up            [experts, 2 N, K] e4m3 or int8 (if WORDS [.., K / 4] int32), contiguous, gate first
    scales, fixed      see `Stack`, of 2 N rows;  bias  [experts, 2 N] or None
    ids, expert_map    as in `experts.triton._few_up_kernel`
    h                  [pairs, N] contiguous, output; rows of pairs of other ranks are not written
    N, K, BLOCK_K      outputs I and inputs H of an expert; H, padded to a power of two
    RULE, POWERS, MOST   see `quantize.triton._quantize_kernel`;  WORDS  four weights are an int32
    ACT                see `gated_of`
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # ids are there, so the next kernel may read weights before it waits
    pair = tl.program_id(0)
    place = _place(ids, expert_map, pair, pair >= 0)
    if place < 0:
        return
    first = tl.program_id(1) * (STEPS * BLOCK_N)
    lane = tl.arange(0, BLOCK_K)[None, None, :]
    WIDE: tl.constexpr = K // 4 if WORDS else K
    word = tl.arange(0, BLOCK_K // 4 if WORDS else BLOCK_K)[None, None, :]
    at = gate_up + place.to(tl.int64) * (2 * N * WIDE) + word
    inside = word < WIDE
    own_col = tl.arange(0, BLOCK_N)
    row = tl.minimum(first + own_col, N - 1)[None, :, None] * WIDE
    gate_tile = tl.load(at + row, mask=inside, other=0.0, eviction_policy="evict_first")
    up_tile = tl.load(at + N * WIDE + row, mask=inside, other=0.0, eviction_policy="evict_first")
    if BLOCK:
        scales += place.to(tl.int64) * (2 * N // BLOCK * (K // 128))
        up_scales = scales + N // BLOCK * (K // 128)
    else:
        scales += place.to(tl.int64) * (2 * N)
        up_scales = scales + N
    gate_scale = tile_scales(scales, first, N, 0, K, BLOCK_N, BLOCK_K, BLOCK)
    up_scale = tile_scales(up_scales, first, N, 0, K, BLOCK_N, BLOCK_K, BLOCK)
    values = tl.load(x + (pair // TOP_K).to(tl.int64) * stride + lane, mask=lane < K, other=0.0).to(tl.float32)
    own = tl.zeros([1, 1, 1], tl.float32)
    if RULE < 0:
        own += tl.load(fixed + place)
    given = quantized(values, own, RULE, POWERS, MOST, 1, BLOCK_K)
    for step in range(STEPS):
        col = first + step * BLOCK_N + own_col
        upcoming = first + (step + 1) * BLOCK_N
        row = tl.minimum(upcoming + own_col, N - 1)[None, :, None] * WIDE
        more = inside & (step < STEPS - 1)
        gate_now, up_now, gate_scale_now, up_scale_now = gate_tile, up_tile, gate_scale, up_scale
        gate_tile = tl.load(at + row, mask=more, other=0.0, eviction_policy="evict_first")
        up_tile = tl.load(at + N * WIDE + row, mask=more, other=0.0, eviction_policy="evict_first")
        gate_scale = tile_scales(scales, upcoming, N, 0, K, BLOCK_N, BLOCK_K, BLOCK)
        up_scale = tile_scales(up_scales, upcoming, N, 0, K, BLOCK_N, BLOCK_K, BLOCK)
        gate = _sums(gate_now, given, gate_scale_now, 1, BLOCK_N, BLOCK_K, BLOCK, MOST, WORDS)
        up = _sums(up_now, given, up_scale_now, 1, BLOCK_N, BLOCK_K, BLOCK, MOST, WORDS)
        if bias is not None:
            mine = bias + place.to(tl.int64) * (2 * N) + col[None, :]
            gate += tl.load(mine, mask=(col < N)[None, :], other=0.0).to(tl.float32)
            up += tl.load(mine + N, mask=(col < N)[None, :], other=0.0).to(tl.float32)
        value = gated_of(gate, up, ACT)
        tl.store(h + pair.to(tl.int64) * N + col[None, :], value.to(h.dtype.element_ty), mask=(col < N)[None, :])


@jit
def _few_down_kernel(
    h,
    down,
    scales,
    fixed,
    bias,
    ids,
    expert_map,
    weights,
    residual,
    y,
    TOP_K: tl.constexpr,
    J: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    RULE: tl.constexpr,
    POWERS: tl.constexpr,
    MOST: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weighted sum over a token's experts of down times h: STEPS times BLOCK_N outputs.

    Grid (tokens, ceil(N / (STEPS BLOCK_N))).

    h                  [pairs, K] contiguous;  down  [experts, N, K], as gate_up
    scales, fixed      see `Stack`;  bias  [experts, N] or None
    ids, expert_map    as in `_few_up_kernel`;  weights  [T, TOP_K] float32
    residual           [T, N] contiguous, added; or None;  y  [T, N] contiguous, output
    TOP_K, J           experts of a token; padded to a power of two
    N, K, BLOCK_K      outputs H and inputs I of an expert; I, padded to a power of two
    """
    token = tl.program_id(0)
    first, own_col = tl.program_id(1) * (STEPS * BLOCK_N), tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)[None, None, :]
    turn = tl.arange(0, J)[:, None, None]
    pair = token * TOP_K + turn
    place = _place(ids, expert_map, pair, turn < TOP_K)
    there = place >= 0
    WIDE: tl.constexpr = K // 4 if WORDS else K
    word = tl.arange(0, BLOCK_K // 4 if WORDS else BLOCK_K)[None, None, :]
    at = down + place.to(tl.int64) * (N * WIDE) + word
    inside = there & (word < WIDE)
    row = tl.minimum(first + own_col, N - 1)[None, :, None] * WIDE
    tile = tl.load(at + row, mask=inside, other=0.0, eviction_policy="evict_first")
    if BLOCK:
        scales += tl.maximum(place, 0).to(tl.int64) * (N // BLOCK * (K // 128))
    else:
        scales += tl.maximum(place, 0).to(tl.int64) * N
    scale = tile_scales(scales, first, N, 0, K, BLOCK_N, BLOCK_K, BLOCK)
    weight = tl.reshape(tl.load(weights + pair, mask=there, other=0.0), [J, 1])
    to = token.to(tl.int64) * N + first + own_col
    if residual is not None:  # written before the kernel before began: its programs have waited
        added = tl.load(residual + to, mask=first + own_col < N, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(h + pair * K + lane, mask=there & (lane < K), other=0.0).to(tl.float32)
    own = tl.zeros([J, 1, 1], tl.float32)
    if RULE < 0:
        own += tl.load(fixed + tl.maximum(place, 0))
    given = quantized(values, own, RULE, POWERS, MOST, J, BLOCK_K)
    for step in range(STEPS):
        col = first + step * BLOCK_N + own_col
        upcoming = first + (step + 1) * BLOCK_N
        row = tl.minimum(upcoming + own_col, N - 1)[None, :, None] * WIDE
        now, scale_now = tile, scale
        tile = tl.load(at + row, mask=inside & (step < STEPS - 1), other=0.0, eviction_policy="evict_first")
        scale = tile_scales(scales, upcoming, N, 0, K, BLOCK_N, BLOCK_K, BLOCK)
        sums = _sums(now, given, scale_now, J, BLOCK_N, BLOCK_K, BLOCK, MOST, WORDS)
        if bias is not None:
            expert = tl.reshape(place, [J, 1])
            mine = bias + expert.to(tl.int64) * N + col[None, :]
            sums += tl.load(mine, mask=(expert >= 0) & (col < N)[None, :], other=0.0).to(tl.float32)
        out = tl.sum(sums * weight, 0)
        if residual is not None:
            out += added.to(tl.float32)
            more = (step < STEPS - 1) & (upcoming + own_col < N)
            added = tl.load(residual + to + (step + 1) * BLOCK_N, mask=more, other=0.0)
        tl.store(y + to + step * BLOCK_N, out.to(y.dtype.element_ty), mask=col < N)


@jit
def _product_kernel(
    x,
    x_scales,
    fixed,
    weight,
    scales,
    bias,
    order,
    starts,
    routing,
    y,
    y_scales,
    stride,
    stride_s,
    stride_y,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    POWERS: tl.constexpr,
    ACT: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of ROWS pairs of an expert by BLOCK_N outputs, on tensor cores. Grid (tiles of pairs * tiles of columns,).

    x                  e4m3 or int8, GATED: [T, K] by token, else [pairs, K] in sorted order; 16 bits with `fixed`
    stride             elements of x from row to row
    x_scales           float32 [K / 128, rows] if BLOCK, stride_s from group to group; [rows]; None with `fixed`
    fixed              [experts] float32 scales of x, which is quantized here; or None
    weight             [experts, 2 N, K] (gate first) if GATED, else [experts, N, K]; e4m3 or int8, contiguous
    scales             see `Stack`;  bias  [experts, 2 N] if GATED, else [experts, N]; or None
    order, starts      see `experts.triton._sort`;  routing  [T, TOP_K] float32 routing weights, None if GATED
    y                  [pairs, N], output: the activation in sorted order if GATED, else weighted results by pair
    y_scales           [N / 128, pairs] float32, output: scales of y in 8 bits, stride_y from group to group; or None
    EXPERTS, WIDTH     experts of this rank; padded to a power of two
    MOST, POWERS       see `quantize.triton._quantize_kernel`, of x; of y
    BAND, STAGES       tiles of pairs that share a column of weights; iterations in flight
    ACT                see `gated_of`, of the products that are GATED; "": of down
    """
    GATED: tl.constexpr = ACT != ""
    if PDL and GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # the order is there: the next kernel may read it before it waits
    expert, first, left, tile = _find_tile(starts, EXPERTS, WIDTH, ROWS, (N + BLOCK_N - 1) // BLOCK_N, BAND)
    row = tl.arange(0, ROWS)
    pair = tl.load(order + first + row, mask=row < left, other=0)
    col = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL and not GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if left <= 0:
        return
    source = pair // TOP_K if GATED else first + tl.where(row < left, row, 0)
    lane = tl.arange(0, 128)
    GROUPS: tl.constexpr = K // 128
    ONE: tl.constexpr = BLOCK >= BLOCK_N
    expert = expert.to(tl.int64)
    x_at = x + source.to(tl.int64)[None, :] * stride + lane[:, None]
    at = weight + expert * (N * K << GATED) + tl.minimum(col, N - 1)[:, None] * K + lane[None, :]
    if BLOCK:
        scale_at = scales + expert * ((N // BLOCK * GROUPS) << GATED)
        up_scales = scale_at + N // BLOCK * GROUPS
        if ONE:
            own_scales = tile * BLOCK_N // BLOCK * GROUPS
        else:
            own_scales = tl.minimum(col, N - 1)[:, None] // BLOCK * GROUPS
    else:
        scale_at = scales + expert * (N << GATED)
        up_scales = scale_at + N
    if fixed is not None:
        given_scale = tl.load(fixed + expert)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = acc
    for group in tl.range(0, GROUPS, num_stages=STAGES):
        given = tl.load(x_at + group * 128)
        if fixed is not None:
            given = to_eight_bits(given.to(tl.float32), given_scale, MOST)
        part = tl.dot(tl.load(at + group * 128), given).to(tl.float32)
        if BLOCK:
            own = tl.load(x_scales + group * stride_s + source)[None, :]
            part *= own * tl.load(scale_at + own_scales + group)
        acc += part
        if GATED:
            part = tl.dot(tl.load(at + N * K + group * 128), given).to(tl.float32)
            if BLOCK:
                part *= own * tl.load(up_scales + own_scales + group)
            up += part
    if BLOCK == 0:
        if fixed is not None:
            own = tl.zeros([1, ROWS], tl.float32) + given_scale
        else:
            own = tl.load(x_scales + source)[None, :]
        acc *= tl.load(scale_at + tl.minimum(col, N - 1))[:, None] * own
        if GATED:
            up *= tl.load(up_scales + tl.minimum(col, N - 1))[:, None] * own
    if bias is not None:
        bias += expert * (N << GATED) + col
        acc += tl.load(bias, mask=col < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + N, mask=col < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = gated_of(acc, up, ACT)
    inside = row < left
    mask = inside[None, :] & (col < N)[:, None]
    if y_scales is not None:
        acc = acc.to(tl.bfloat16).to(tl.float32)
        parts = tl.reshape(tl.trans(acc), [ROWS, BLOCK_N // 128, 128])
        own = scale_of(tl.max(magnitude(parts), 2), MOST, POWERS)
        group = tile * (BLOCK_N // 128) + tl.arange(0, BLOCK_N // 128)
        tl.store(y_scales + group[None, :] * stride_y + (first + row)[:, None], own, mask=inside[:, None])
        narrow = tl.reshape(to_eight_bits(parts, own[:, :, None], MOST), [ROWS, BLOCK_N])
        to = y + (first + row).to(tl.int64)[:, None] * N + col[None, :]
        tl.store(to, narrow, mask=inside[:, None] & (col < N)[None, :])
    else:
        to = first + row
        if not GATED:
            to = pair
            acc *= tl.load(routing + pair, mask=inside, other=0.0)[None, :]
        tl.store(y + to.to(tl.int64)[None, :] * N + col[:, None], acc.to(y.dtype.element_ty), mask=mask)
