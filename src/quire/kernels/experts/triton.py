"""Experts on NVIDIA GPUs. The host never waits for the device: grids are upper bounds, and programs without work end.

A pair is a token and one of its k experts; pair p belongs to token p // k.

Few tokens     float32 arithmetic without tensor cores, each pair by itself: one kernel for gate and up, one for down
               and the sum over k. They have enough programs to read at the speed of memory.
Many tokens    Pairs are sorted by expert (_sort_kernel, or _count_kernel and _order_kernel). Tensor cores multiply
               tiles of pairs of one expert (_product_kernel): first gate and up, which gives their activation in sorted
               order; then down, which gives weighted rows by pair. _sum_kernel adds the k rows of a token.

The order of additions depends on the shapes, never on time. Floors on an H200 in bfloat16: the weights of the hit
experts over 4.3 TB/s, or 6 T k I H operations over 780 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.activation.triton import gated, gated_of, pointwise_of
from quire.kernels.attention.triton_plan import shared_memory
from quire.kernels.experts.stacked import Packed as Packed
from quire.kernels.experts.stacked import destination as destination
from quire.kernels.experts.stacked import empty as empty
from quire.kernels.experts.stacked import put as put
from quire.kernels.experts.weights import activated
from quire.kernels.linear.gemv import bucket, prefetch
from quire.kernels.lora.routed import ExpertAdapters, Join, Routed
from quire.kernels.triton_runtime import jit, tl

Products = Callable[..., None]
# Multiplies rows [pairs, K] in the order of experts: (rows, order, starts, routing weights [T, k], number of experts
# over which pairs spread) -> [pairs, N] by number of the pair, times the routing weights.
Product = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
MOST_FEW = 4  # tokens
MOST_SCANNED = 4096  # up to so many pairs, each expert's program scans all pairs; more are divided among programs
SHARES, CHUNK = 128, 128  # most programs that divide the pairs; pairs that one orders at a time
BAND = 8  # tiles of pairs that run side by side through the same columns of weights, which are then read once


@dataclass(frozen=True)
class Tiles:
    """The tiling of a product of the expert MLP.

    rows     pairs (token, chosen expert) of a tile
    cols     outputs of a tile
    deep     inputs of an iteration
    stages   iterations in flight (num_stages of Triton)
    tall     True: tensor cores take the weights as the tall operand (M), so that pairs are padded to 8 only
    """

    rows: int
    cols: int
    deep: int
    warps: int
    stages: int
    tall: bool = False


def tiles(pairs: int, experts: int, item_bytes: int) -> tuple[Tiles, Tiles]:
    """Return the tilings of the two products (gate and up; down), by the mean number of pairs per expert."""
    mean = pairs / experts
    if item_bytes == 4:
        cut = Tiles(16 if mean <= 8 else 32, 32, 32, 4, 2)
        return cut, cut
    if mean <= 24:
        rows, tall = (16, True) if mean <= 8 else (32, False)
        return Tiles(rows, 64, 128, 4, 3, tall), Tiles(rows, 128, 128, 4, 3, tall)
    if mean <= 64:
        return Tiles(64, 64, 64, 4, 4), Tiles(64, 128, 64, 4, 4)
    return Tiles(128, 128, 64, 8, 3, True), Tiles(128, 256, 64, 8, 4)


def run(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
    join: Callable[[], bool] | None = None,
    products: Products | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts.

    See `quire.kernels.experts`. The result overwrites a contiguous `residual`.

    products   function that computes the two products for many tokens; None: this module's `products`
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is None else residual.contiguous()
    given = x, weights, ids, packed, expert_map, None if residual is None else y, y
    if len(x) > MOST_FEW:
        many(*given, join=join, multiply=products)
    elif len(x):
        few(*given, join=join)
    return y


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
    (tokens, k), (_, hidden, inner), in_pdl = ids.shape, packed.down.shape, pdl.in_use()
    deep, across = min(1024, bucket(hidden)), bucket(k)
    h = x.new_empty(tokens * k, inner)
    _few_up_kernel[(tokens * k, inner)](
        x,
        packed.gate_up,
        packed.gate_up_bias,
        ids,
        expert_map,
        h,
        x.stride(0),
        k,
        inner,
        hidden,
        1,
        deep,
        packed.act,
        in_pdl,
        num_warps=max(1, deep // 256),
        **pdl.options(in_pdl),
    )
    deep = min(bucket(max(8, inner)), max(64, 2048 // across))
    in_pdl = not (join and join()) and in_pdl
    _few_down_kernel[(tokens, -(-hidden // 2))](
        h,
        packed.down,
        packed.down_bias,
        ids,
        expert_map,
        weights,
        residual,
        y,
        k,
        across,
        hidden,
        inner,
        2,
        deep,
        in_pdl,
        num_warps=8,
        **pdl.options(in_pdl),
    )


def many(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    cut: tuple[Tiles, Tiles] | None = None,
    join: Callable[[], bool] | None = None,
    multiply: Products | None = None,
) -> None:
    """Compute `run` for many tokens and write the result to y. Pairs (token, chosen expert) are sorted by expert.

    cut        tilings of the two products (gate and up; down); None: `tiles` chooses them
    multiply   function that computes the two products; None: `products`
    """
    (experts, hidden, inner), pairs = packed.down.shape, ids.numel()
    order, starts = _sort(ids, expert_map, experts)
    h, parts = x.new_empty(pairs, inner), x.new_empty(pairs, hidden)
    cut = cut or tiles(pairs, experts if expert_map is None else len(expert_map), x.element_size())
    (multiply or products)(x, packed, h, parts, order, starts, weights, cut)
    sum_pairs(parts, ids, expert_map, residual, y, join)


def products(
    x: Tensor,
    packed: Packed,
    h: Tensor,
    parts: Tensor,
    order: Tensor,
    starts: Tensor,
    weights: Tensor,
    cut: tuple[Tiles, Tiles],
) -> None:
    """Compute the expert MLPs of all pairs (token, chosen expert) in two products: x [T, H] -> h -> parts.

    h        [pairs, I], output in the order of `order`: the activation of gate and up
    parts    [pairs, H], output in the order of pair numbers: down, times the routing weight
    order    [pairs] int32: numbers of the pairs, sorted by expert; pair p belongs to token p // k
    starts   [experts + 1] int32: first entry of each expert in `order`
    """
    first, second, act, first_bias, second_bias = packed
    _product(x, first, first_bias, h, order, starts, weights.shape[1], None, act, cut[0])
    _product(h, second, second_bias, parts, order, starts, weights.shape[1], weights, "", cut[1])


def run_adapted(
    x: Tensor, routed: Routed, packed: Packed, residual: Tensor | None, adapters: ExpertAdapters, *join: Join
) -> Tensor:
    """Compute `run` with adapters. See `quire.kernels.experts`."""

    def multiplied(weight: Tensor, bias: Tensor | None, second: int) -> Product:
        def product(rows: Tensor, order: Tensor, starts: Tensor, scales: Tensor, spread: int) -> Tensor:
            y = rows.new_empty(len(rows), weight.shape[1])
            cut = tiles(len(rows), spread, rows.element_size())[second]
            _product(rows, weight, bias, y, order, starts, scales.shape[1], scales, "", cut)
            return y

        return product

    first, second, act, first_bias, second_bias = packed
    products = multiplied(first, first_bias, 0), multiplied(second, second_bias, 1)
    return run_apart(x, routed, products, act, len(first), residual, adapters, *join)


def run_apart(
    x: Tensor,
    routed: Routed,
    products: tuple[Product, Product],
    act: str,
    experts: int,
    residual: Tensor | None,
    adapters: ExpertAdapters,
    *join: Join,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts, with adapters.

    Each product multiplies rows in the order of experts and writes rows by number of the pair, as `down` does in
    `many`. So rows are copied before both: steps without adapters do not run this.

    products   gate and up, and down;  act  activation between them;  experts  of this rank
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is None else residual.contiguous()
    if not len(x):
        return y
    weights, ids, expert_map = routed
    spread, between = experts if expert_map is None else len(expert_map), adapters.of_pairs(ids, expert_map)
    order, starts = _sort(ids, expert_map, experts)
    pairs = order.clamp(0, ids.numel() - 1)  # behind the pairs of this rank's experts stands anything
    inner = products[0](x[pairs // ids.shape[1]], order, starts, torch.ones_like(weights), spread)
    between.add_up(inner, x)
    h = activated(inner, act, gated)
    parts = products[1](h[pairs], order, starts, weights, spread)
    between.add_down(parts, h, weights)
    sum_pairs(parts, ids, expert_map, None if residual is None else y, y, *join)
    return y


def sum_pairs(
    parts: Tensor, ids: Tensor, expert_map: Tensor | None, residual: Tensor | None, y: Tensor, *join: Join | None
) -> None:
    """Write residual + the sum of each token's weighted rows `parts` [T * k, H] to y [T, H]."""
    (tokens, k), hidden = ids.shape, y.shape[1]
    block = min(1024, bucket(hidden))
    in_pdl = not any([one() for one in join if one]) and pdl.in_use()
    _sum_kernel[(tokens, -(-hidden // block))](
        parts, ids, expert_map, residual, y, k, hidden, block, in_pdl, num_warps=4, **pdl.options(in_pdl)
    )


def _sort(ids: Tensor, expert_map: Tensor | None, experts: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert, stably, without pairs of other ranks' experts.

    Returns order [pairs] int32, and starts [experts + 1] int32: first entry of each expert, and the end of the last.
    """
    pairs, in_pdl, options = ids.numel(), pdl.in_use(), pdl.options(pdl.in_use())
    order, starts = (torch.empty(n, dtype=torch.int32, device=ids.device) for n in (pairs, experts + 1))
    if pairs <= MOST_SCANNED:
        block = 1024 if pairs <= 1024 else MOST_SCANNED
        _sort_kernel[(experts,)](
            ids, expert_map, order, starts, pairs, experts, block, in_pdl, num_warps=block // 256, **options
        )
        return order, starts
    share, width = -(-pairs // (SHARES * CHUNK)) * CHUNK, max(32, bucket(experts))
    blocks = -(-pairs // share)
    counts = torch.empty(blocks, width, dtype=torch.int32, device=ids.device)
    _count_kernel[(blocks,)](ids, expert_map, counts, pairs, share, width, 512, in_pdl, num_warps=4, **options)
    _order_kernel[(blocks,)](
        ids,
        expert_map,
        counts,
        order,
        starts,
        pairs,
        share,
        blocks,
        experts,
        width,
        CHUNK,
        in_pdl,
        num_warps=4,
        **options,
    )
    return order, starts


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    order: Tensor,
    starts: Tensor,
    k: int,
    scales: Tensor | None,
    act: str,
    cut: Tiles,
) -> None:
    in_pdl, pairs, experts, width = pdl.in_use(), len(order), weight.shape[0], y.shape[1]
    room = shared_memory() // (x.element_size() * cut.deep * (cut.rows + cut.cols * (weight.shape[1] // width)))
    most = (pairs + min(experts, pairs) * (cut.rows - 1)) // cut.rows  # tiles of pairs
    _product_kernel[(most * -(-width // cut.cols),)](
        x,
        weight,
        bias,
        order,
        starts,
        scales,
        y,
        x.stride(0),
        k,
        experts,
        bucket(experts),
        width,
        weight.shape[2],
        cut.rows,
        cut.cols,
        cut.deep,
        cut.tall,
        act,
        BAND,
        in_pdl,
        num_warps=cut.warps,
        num_stages=max(1, min(cut.stages, room)),
        **pdl.options(in_pdl),
    )


@jit
def _place(ids, expert_map, at, mask):
    """Return the place of each pair's expert on this rank; -1 for an expert of another rank."""
    place = tl.load(ids + at, mask=mask, other=-1)
    if expert_map is not None:
        place = tl.load(expert_map + place, mask=place >= 0, other=-1)
    return place


@jit
def _few_up_kernel(
    x,
    gate_up,
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
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The activation of BLOCK_N outputs of a pair. Grid (pairs, ceil(N / BLOCK_N)).

    x                  [T, K];  stride  elements from token to token
    gate_up, bias      [experts, 2 N, K] contiguous, gate first; [experts, 2 N] or None. ACT "relu2": N rows of each
    ids, expert_map    [T, TOP_K] int32; [all experts] int32 or None, see `quire.kernels.experts`
    h                  [pairs, N] contiguous, output; rows of pairs of other ranks are not written
    N, K               outputs I and inputs H of an expert;  BLOCK_K  inputs of an iteration
    ACT                see `gated_of`, or "relu2", which has no gate
    """
    GATED: tl.constexpr = ACT != "relu2"
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # ids are there, so the next kernel may read weights before it waits
    pair = tl.program_id(0)
    place = _place(ids, expert_map, pair, pair >= 0)
    if place < 0:
        return
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)[None, :]
    at = gate_up + place.to(tl.int64) * (N * K << GATED) + tl.minimum(col, N - 1)[:, None] * K + lane
    source = x + (pair // TOP_K).to(tl.int64) * stride + lane
    gate_tile = tl.load(at, mask=lane < K, other=0.0, eviction_policy="evict_first")
    up_tile = gate_tile
    if GATED:
        up_tile = tl.load(at + N * K, mask=lane < K, other=0.0, eviction_policy="evict_first")
    gate, up = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32), tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for start in range(0, K, BLOCK_K):
        given = tl.load(source + start, mask=start + lane < K, other=0.0).to(tl.float32)
        gate_now, up_now = gate_tile.to(tl.float32), up_tile.to(tl.float32)
        more = start + BLOCK_K + lane < K
        gate_tile = tl.load(at + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        if GATED:
            up_tile = tl.load(at + N * K + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        gate += tl.sum(tl.reshape(gate_now * given, [BLOCK_N, BLOCK_K // 8, 8]), 2)
        if GATED:
            up += tl.sum(tl.reshape(up_now * given, [BLOCK_N, BLOCK_K // 8, 8]), 2)
    one, two = tl.sum(gate, 1), tl.sum(up, 1)
    if bias is not None:
        bias += place.to(tl.int64) * (N << GATED) + col
        one += tl.load(bias, mask=col < N, other=0.0).to(tl.float32)
        if GATED:
            two += tl.load(bias + N, mask=col < N, other=0.0).to(tl.float32)
    value = gated_of(one, two, ACT) if GATED else pointwise_of(one, ACT)
    tl.store(h + pair.to(tl.int64) * N + col, value.to(h.dtype.element_ty), mask=col < N)


@jit
def _few_down_kernel(
    h,
    down,
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
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of a token: weighted sum over its experts of down times h. Grid (tokens, ceil(N / BLOCK_N)).

    h                  [pairs, K] contiguous;  down, bias  [experts, N, K] contiguous; [experts, N] or None
    ids, expert_map    as in `_few_up_kernel`;  weights  [T, TOP_K] float32
    residual           [T, N] contiguous, added; or None;  y  [T, N] contiguous, output
    TOP_K, J           experts of a token; padded to a power of two
    N, K               outputs H and inputs I of an expert;  BLOCK_K  inputs of an iteration
    """
    token = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)[None, None, :]
    turn = tl.arange(0, J)[:, None, None]
    pair = token * TOP_K + turn
    place = _place(ids, expert_map, pair, turn < TOP_K)
    there = place >= 0
    at = down + place.to(tl.int64) * (N * K) + tl.minimum(col, N - 1)[None, :, None] * K + lane
    tile = tl.load(at, mask=there & (lane < K), other=0.0, eviction_policy="evict_first")
    weight = tl.load(weights + pair, mask=there, other=0.0)
    to = token.to(tl.int64) * N + col
    if residual is not None:  # written before the kernel before began: its programs have waited
        added = tl.load(residual + to, mask=col < N, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([J, BLOCK_N, BLOCK_K // 8], tl.float32)
    for start in range(0, K, BLOCK_K):
        given = tl.load(h + pair * K + start + lane, mask=there & (start + lane < K), other=0.0).to(tl.float32)
        now = tile.to(tl.float32)
        more = there & (start + BLOCK_K + lane < K)
        tile = tl.load(at + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        acc += tl.sum(tl.reshape(now * (given * weight), [J, BLOCK_N, BLOCK_K // 8, 8]), 3)
    out = tl.sum(tl.sum(acc, 2), 0)
    if bias is not None:
        own = tl.reshape(place, [J, 1])
        at = bias + own.to(tl.int64) * N + col[None, :]
        biases = tl.load(at, mask=(own >= 0) & (col < N)[None, :], other=0.0).to(tl.float32)
        out += tl.sum(biases * tl.reshape(weight, [J, 1]), 0)
    if residual is not None:
        out += added.to(tl.float32)
    tl.store(y + to, out.to(y.dtype.element_ty), mask=col < N)


@jit(do_not_specialize=["pairs"])
def _sort_kernel(ids, expert_map, order, starts, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Sort up to BLOCK pairs. Grid (EXPERTS,): a program writes an expert's pairs, after those of earlier experts.

    ids, expert_map    as in `_few_up_kernel`;  order, starts  outputs, see `_sort`
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    place = _place(ids, expert_map, lane, lane < pairs)
    at = tl.sum(((place >= 0) & (place < expert)).to(tl.int32), 0)
    mine = (place == expert).to(tl.int32)
    tl.store(order + at + tl.cumsum(mine, 0) - 1, lane, mask=place == expert)
    tl.store(starts + expert, at)
    tl.store(starts + EXPERTS, at + tl.sum(mine, 0), mask=expert == EXPERTS - 1)


@jit(do_not_specialize=["pairs"])
def _count_kernel(ids, expert_map, counts, pairs, share, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Count the pairs of each expert in a share of the pairs. Grid (shares,).

    ids, expert_map    as in `_few_up_kernel`;  pairs, share  number of pairs, of all and of a program
    counts             [shares, WIDTH] int32, output;  WIDTH  experts, padded to a power of two
    BLOCK              pairs of an iteration
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, pairs)
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([WIDTH], tl.int32)
    for start in range(first, end, BLOCK):
        place = _place(ids, expert_map, start + lane, start + lane < end)
        count += tl.histogram(tl.maximum(place, 0), WIDTH, mask=place >= 0)
    tl.store(counts + tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), count)


@jit(do_not_specialize=["pairs", "blocks"])
def _order_kernel(
    ids,
    expert_map,
    counts,
    order,
    starts,
    pairs,
    share,
    blocks,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort a share of the pairs: each pair goes after all of smaller experts, and after earlier ones of its expert.

    Grid (blocks,).

    ids .. share       as in `_count_kernel`;  counts  [blocks, WIDTH] int32 of `_count_kernel`
    order, starts      outputs, see `_sort`
    CHUNK              pairs of an iteration
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    end = tl.minimum(block * share + share, pairs)
    lane, expert = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    place = _place(ids, expert_map, block * share + lane, block * share + lane < end)
    total, at = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
    for top in range(0, blocks, 8192 // WIDTH):  # as many counts at a time as registers hold
        row = top + tl.arange(0, 8192 // WIDTH)[:, None]
        count = tl.load(counts + row * WIDTH + expert[None, :], mask=row < blocks, other=0)
        total += tl.sum(count, 0)
        at += tl.sum(tl.where(row < block, count, 0), 0)
    ends = tl.cumsum(total, 0)
    at += ends - total
    if block == 0:
        tl.store(starts, 0)
        tl.store(starts + 1 + expert, ends, mask=expert < EXPERTS)
    for start in range(block * share, end, CHUNK):
        coming = _place(ids, expert_map, start + CHUNK + lane, start + CHUNK + lane < end)
        same = ((place[:, None] == place[None, :]) & (lane[:, None] < lane[None, :])).to(tl.int32)
        tl.store(order + tl.gather(at, tl.maximum(place, 0), 0) + tl.sum(same, 0), start + lane, mask=place >= 0)
        at += tl.histogram(tl.maximum(place, 0), WIDTH, mask=place >= 0)
        place = coming


@jit
def _find_tile(
    starts, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BAND: tl.constexpr
):
    """Return the tile of this program: (expert, its first entry in `order`, the expert's pairs from there on, column).

    No pairs (<= 0) means that there is no such tile. The column is a number among COLS tiles of columns. BAND tiles of
    pairs share a column before the next column comes.
    """
    at = tl.arange(0, WIDTH)
    start = tl.load(starts + at, mask=at < EXPERTS, other=0)
    end = tl.load(starts + at + 1, mask=at < EXPERTS, other=0)
    count = (end - start + ROWS - 1) // ROWS
    after = tl.cumsum(count, 0)
    band = tl.program_id(0) // (BAND * COLS) * BAND
    height = tl.maximum(tl.minimum(tl.sum(count, 0) - band, BAND), 1)
    number = tl.program_id(0) % (BAND * COLS)
    tile, col = band + number % height, number // height
    mine = (tile < after) & (tile >= after - count) & (col < COLS)
    first = tl.sum(tl.where(mine, start + (tile - after + count) * ROWS, 0), 0)
    return tl.sum(tl.where(mine, at, 0), 0), first, tl.sum(tl.where(mine, end, 0), 0) - first, col


@jit
def _dot(weights, rows, acc, TALL: tl.constexpr):
    """Return acc + weights [N, K] @ rows.T if TALL, else acc + rows [M, K] @ weights.T."""
    if TALL:
        acc = tl.dot(weights, tl.trans(rows), acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")
    return acc


@jit
def _product_kernel(
    x,
    weight,
    bias,
    order,
    starts,
    scales,
    y,
    stride,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
    ACT: tl.constexpr,
    BAND: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of ROWS pairs of an expert by BLOCK_N outputs, on tensor cores. Grid (tiles of pairs * tiles of columns,).

    x                  FIRST: [T, K] by token, else [pairs, K] in sorted order;  stride  elements from row to row
    weight             [experts, 2 N, K] (gate first) if GATED, else [experts, N, K]; contiguous
    bias               [experts, 2 N] if GATED, else [experts, N]; or None
    order, starts      see `_sort`;  scales  [T, TOP_K] float32 routing weights, None if FIRST
    y                  [pairs, N]: the activation in sorted order if FIRST, else weighted results by pair; output
    EXPERTS, WIDTH     experts of this rank; padded to a power of two
    BLOCK_K            inputs of an iteration;  TALL  the weights are the tall operand
    BAND               tiles of pairs that share a column of weights
    ACT                "": of down; else the product is the FIRST. See `gated_of`; "relu2" is not GATED
    """
    FIRST: tl.constexpr = ACT != ""
    GATED: tl.constexpr = FIRST and ACT != "relu2"
    if PDL and FIRST:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # the order is there: the next kernel may read it before it waits
    expert, first, left, tile = _find_tile(starts, EXPERTS, WIDTH, ROWS, (N + BLOCK_N - 1) // BLOCK_N, BAND)
    row = tl.arange(0, ROWS)
    pair = tl.load(order + first + row, mask=row < left, other=0)
    col = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight += expert.to(tl.int64) * (N * K << GATED)
    if PDL and not FIRST:
        if left > 0:
            prefetch(weight, col, N, K, BLOCK_N, 256)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if left <= 0:
        return
    source = pair // TOP_K if FIRST else first + tl.where(row < left, row, 0)
    lane = tl.arange(0, BLOCK_K)
    x_at = x + source.to(tl.int64)[:, None] * stride + lane[None, :]
    at = weight + tl.minimum(col, N - 1)[:, None] * K + lane[None, :]
    EVEN: tl.constexpr = K % BLOCK_K == 0
    acc = tl.zeros([BLOCK_N, ROWS] if TALL else [ROWS, BLOCK_N], tl.float32)
    up = acc
    for start in range(0, K, BLOCK_K):
        inside = (start + lane < K)[None, :] | EVEN
        given = tl.load(x_at + start, mask=inside, other=0.0)
        part = tl.load(at + start, mask=inside, other=0.0)
        acc = _dot(part, given, acc, TALL)
        if GATED:
            up = _dot(tl.load(at + N * K + start, mask=inside, other=0.0), given, up, TALL)
    if bias is not None:
        bias += expert.to(tl.int64) * (N << GATED) + col
        own = tl.load(bias, mask=col < N, other=0.0).to(tl.float32)
        acc += own[:, None] if TALL else own[None, :]
        if GATED:
            own = tl.load(bias + N, mask=col < N, other=0.0).to(tl.float32)
            up += own[:, None] if TALL else own[None, :]
    if FIRST:
        acc = gated_of(acc, up, ACT) if GATED else pointwise_of(acc, ACT)
    if TALL:
        acc = tl.trans(acc)
    to = first + row
    if not FIRST:
        to = pair
        acc = acc * tl.load(scales + pair, mask=row < left, other=0.0)[:, None]
    mask = (row < left)[:, None] & (col < N)[None, :]
    tl.store(y + to.to(tl.int64)[:, None] * N + col[None, :], acc.to(y.dtype.element_ty), mask=mask)


@jit
def _sum_kernel(
    parts, ids, expert_map, residual, y, TOP_K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Sum of a token's TOP_K weighted rows, and the residual. Grid (tokens, ceil(N / BLOCK)).

    parts              [pairs, N] contiguous;  ids, expert_map  as in `_few_up_kernel`
    residual           [T, N] contiguous, or None;  y  [T, N] contiguous, output
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for turn in tl.static_range(TOP_K):
        pair = token * TOP_K + turn
        there = _place(ids, expert_map, pair, turn >= 0) >= 0
        total += tl.load(parts + pair * N + col, mask=there & (col < N), other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + token * N + col, mask=col < N, other=0.0).to(tl.float32)
    tl.store(y + token * N + col, total.to(y.dtype.element_ty), mask=col < N)
