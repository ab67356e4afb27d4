"""Norm, router and choice of experts in one kernel, for few rows; on request the normed rows in 8 bits, too.

PARTS programs share a token. Each norms its own copy of the token's row and multiplies it with some of the router's
rows, whose first ones it reads before it waits for the kernels before. The program that ends last reads all logits of
the token and chooses the experts by the keys of `quire.kernels.routing.triton`. Up to MOST_COMPARED experts, the place
of one is the number of keys above its own, so that no maximum waits for the one before.

Formulas, roundings and choices are those of the norm, the router's product and `triton.route`. Sums have an order of
their own, which depends on the shapes, never on time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.args.experts import Routing
from quire.config.env import fewer_launches
from quire.contracts.scheme import GROUP
from quire.kernels import pdl
from quire.kernels.experts.sorted_ids import SortedIds
from quire.kernels.linear.gemv import bucket
from quire.kernels.quantize.rows import QuantizedRows
from quire.kernels.quantize.triton import magnitude, scale_of, to_eight_bits
from quire.kernels.routing.triton import NEVER, keys_of
from quire.kernels.triton_runtime import jit, tl

ENABLED = fewer_launches()  # read at each step: a measurement may change it between two captures
MOST_ROWS = 16
MOST_COMPARED = 128  # experts up to which each key is compared with all others; with more, registers are spilled
MOST_COLUMNS = 8192  # a program holds a row in registers
PROGRAMS = 128  # of all tokens together
MOST_SORTED = 128  # pairs (token, chosen expert): each is compared with all others
APART = 32  # numbers between two counters: each has a line of memory of its own


@dataclass(frozen=True)
class Scored:
    """The arguments of a router beside its rows.

    norm, eps   weight [K] of the RMS norm before the router, and what is added to the mean square
    weight      router [E, K] in the dtype of the rows;  bias  [E] or None
    counters    as `empty_counters` returns them; a router has its own
    exact       True: logits stay float32; False: they are rounded to the dtype of the rows
    correction, expert_scale   see `quire.kernels.routing`
    """

    norm: Tensor
    eps: float
    weight: Tensor
    bias: Tensor | None
    counters: Tensor
    exact: bool
    correction: Tensor | None = None
    expert_scale: Tensor | None = None


def empty_counters(device: torch.device) -> Tensor:
    """Return the counters of a router: programs of each token that have ended, and tokens whose experts are chosen.

    The last program, or token, sets the counter to 0.
    """
    return torch.zeros((MOST_ROWS + 1) * APART, dtype=torch.int32, device=device)


def fits(x: Tensor, weight: object, routing: Routing) -> bool:
    """Return True if `route` can take the rows x [T, K] and a router's packed weight."""
    return (
        0 < len(x) <= MOST_ROWS
        and isinstance(weight, Tensor)
        and weight.dtype == x.dtype != torch.float32
        and x.shape[1] <= MOST_COLUMNS
        and x.shape[1] % 8 == 0
        and x.stride(1) == 1
    )


@dataclass(frozen=True)
class Forms:
    """The forms in which the experts take their rows.

    eight_bits   return the normed rows in e4m3 as well, with a scale for each 128 columns; K is a multiple of 128
    powers       these scales are rounded up to powers of two
    sorts        return sorted pairs, of at most MOST_SORTED
    """

    eight_bits: bool = False
    powers: bool = False
    sorts: bool = False


PLAIN = Forms()


def route(
    x: Tensor, scored: Scored, routing: Routing, live: Tensor | None = None, forms: Forms = PLAIN
) -> tuple[Tensor, QuantizedRows | None, Tensor, Tensor | SortedIds]:
    """Norm x [T, K] of at most 16 rows, and choose experts; return (normed, rows in 8 bits or None, weights, ids)."""
    (rows, columns), k, experts, device = x.shape, routing.top_k, routing.num_experts, x.device
    normed = torch.empty((rows, columns), dtype=x.dtype, device=device)
    logits = torch.empty((rows, experts), dtype=torch.float32, device=device)
    weights = torch.empty((rows, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int32, device=device)
    codes = scales = order = starts = None
    if forms.sorts:
        assert rows * k <= MOST_SORTED, f"{rows} rows of {k} experts"
        order = torch.empty(rows * k, dtype=torch.int32, device=device)
        starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    if forms.eight_bits:
        assert columns % GROUP == 0, f"{columns} columns"
        codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty((columns // GROUP, rows), dtype=torch.float32, device=device)
    each = bucket(-(-experts * bucket(rows) // PROGRAMS))
    cols, parts, size, wide = min(4, each), -(-experts // each), experts // routing.num_groups, bucket(columns)
    in_pdl = pdl.in_use()
    _normed_kernel[(rows, parts)](
        x,
        scored.norm,
        scored.weight,
        scored.bias,
        scored.correction,
        scored.expert_scale,
        live,
        normed,
        codes,
        scales,
        logits,
        scored.counters,
        weights,
        ids,
        order,
        starts,
        x.stride(0),
        rows,
        scored.eps,
        routing.normalize_eps,
        routing.scaling,
        columns,
        max(GROUP, wide),
        cols,
        each // cols,
        parts,
        APART,
        MOST_ROWS,
        scored.exact,
        forms.powers,
        bucket(rows * k) if forms.sorts else 0,
        bucket(experts),
        bucket(size) * bucket(routing.num_groups) <= MOST_COMPARED,
        k,
        experts,
        size,
        bucket(size),
        routing.num_groups,
        bucket(routing.num_groups),
        routing.top_groups,
        routing.scoring == "softmax",
        routing.group_score == "top2",
        routing.normalize,
        routing.by_logits,
        in_pdl,
        num_warps=min(16, max(4, wide // 256)),
        **pdl.options(in_pdl),
    )
    narrow = None if codes is None or scales is None else QuantizedRows(codes, scales.t(), x.dtype)
    return normed, narrow, weights, ids if order is None or starts is None else SortedIds(ids, order, starts)


@jit(do_not_specialize=["rows"])
def _normed_kernel(
    x,
    norm,
    weight,
    bias,
    correction,
    expert_scale,
    live,
    normed,
    codes,
    scales,
    logits,
    counters,
    weights,
    ids,
    order,
    starts,
    stride,
    rows,
    eps,
    normalize_eps,
    scaling,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    APART: tl.constexpr,
    MOST: tl.constexpr,
    EXACT: tl.constexpr,
    POWERS: tl.constexpr,
    PAIRS: tl.constexpr,
    SPAN: tl.constexpr,
    COMPARES: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    S: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    TOP2: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm a token's row and choose its experts; a program has STEPS * BLOCK_N of the router's rows.

    Grid (tokens, PARTS). Neighbours read the same rows of the router.

    x                    [T, K] bf16 or f16;  stride  elements from token to token
    norm, eps            [K] weight of the RMS norm; added to the mean square
    weight, bias         [EXPERTS, K] contiguous; [EXPERTS] or None
    normed               [T, K] contiguous, output
    codes, scales        [T, K] e4m3; [K / 128, T] float32: outputs, or both None
    logits, counters     [T, EXPERTS] float32, scratch; see `empty_counters`, APART numbers from one to the next
    order, starts        see `SortedIds`: outputs, or both None;  rows  T
    live .. BY_LOGITS    as in `triton._route_kernel`; normalize_eps is its `eps`, TOP_K its K
    K, WIDE              inputs; padded to a power of two
    EXACT, POWERS        logits are not rounded; scales are powers of two
    PAIRS, SPAN          T * TOP_K and EXPERTS, padded to a power of two; used where pairs are sorted
    COMPARES             an expert's place is the number of keys above its own; False: the largest is taken TOP_K times
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, WIDE)[None, :]
    inside = lane < K
    first = part * (STEPS * BLOCK_N) + tl.arange(0, BLOCK_N)
    at = weight + first[:, None] * K + lane
    tile = tl.load(at, mask=inside & (first < EXPERTS)[:, None], other=0.0)
    factor = tl.load(norm + lane, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    given = tl.load(x + row * stride + lane, mask=inside, other=0.0)
    values = given.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) / K + eps)
    rounded = (values * factor).to(given.dtype)
    values = rounded.to(tl.float32)
    for step in tl.static_range(STEPS):
        expert = first + step * BLOCK_N
        now = tile
        if step < STEPS - 1:
            there = inside & (expert + BLOCK_N < EXPERTS)[:, None]
            tile = tl.load(at + (step + 1) * BLOCK_N * K, mask=there, other=0.0)
        sums = tl.sum(now.to(tl.float32) * values, 1)
        if bias is not None:
            sums += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
        if not EXACT:
            sums = sums.to(given.dtype).to(tl.float32)
        tl.store(logits + row * EXPERTS + expert, sums, mask=expert < EXPERTS)
    counter = counters + row * APART
    tl.debug_barrier()  # all logits of the program are written before it is counted
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    own = inside & (lane // 128 % PARTS == part)
    tl.store(normed + row * K + lane, rounded, mask=own)
    if codes is not None:
        group = tl.arange(0, WIDE // 128)
        parted = tl.reshape(values, [WIDE // 128, 128])
        scale = scale_of(tl.max(magnitude(parted), 1), 448, POWERS)
        tl.store(scales + group * rows + row, scale, mask=(group < K // 128) & (group % PARTS == part))
        narrow = tl.reshape(to_eight_bits(parted, scale[:, None], 448), [1, WIDE])
        tl.store(codes + row * K + lane, narrow, mask=own)
    if before == PARTS - 1:
        tl.store(counter, 0)
        set_of, member = tl.arange(0, G)[:, None], tl.arange(0, S)[None, :]
        name = set_of * SIZE + member
        known = (set_of < GROUPS) & (member < SIZE)
        logit = tl.load(logits + row * EXPERTS + name, mask=known, other=float("-inf"), cache_modifier=".cg")
        key, scores = keys_of(
            logit, correction, set_of, name, known, EXPERTS, GROUPS, TOP_GROUPS, SOFTMAX, TOP2, BY_LOGITS
        )
        keys, score = tl.reshape(key, [G * S]), tl.reshape(scores, [G * S])
        flat = tl.reshape(name, [G * S])
        if COMPARES:
            place = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
        else:
            place = tl.full([G * S], TOP_K, tl.int32)
            for j in tl.static_range(TOP_K):
                most = keys == tl.max(keys, 0)
                place, keys = tl.where(most, j, place), tl.where(most, NEVER, keys)
        chosen = place < TOP_K
        value = tl.where(chosen, score, 0.0)
        if NORMALIZE:
            value = value / (tl.sum(value, 0) + normalize_eps)
        value *= scaling
        if expert_scale is not None:
            value *= tl.load(expert_scale + flat, mask=chosen, other=0.0)
        tl.store(weights + row * TOP_K + place, value, mask=chosen)
        if live is not None:
            flat = tl.where(tl.load(live + row), flat, -1)
        tl.store(ids + row * TOP_K + place, flat, mask=chosen)
        if order is not None:
            tl.debug_barrier()  # the token's experts are written before it is counted
            tokens = counters + MOST * APART
            if tl.atomic_add(tokens, 1, sem="acq_rel") == rows - 1:
                tl.store(tokens, 0)
                _sort(ids, order, starts, rows * TOP_K, EXPERTS, PAIRS, SPAN)


@jit
def _sort(ids, order, starts, pairs, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, SPAN: tl.constexpr):
    """Sort up to PAIRS pairs by expert, in one program. See `SortedIds`; SPAN  EXPERTS, padded to a power of two."""
    pair, span = tl.arange(0, PAIRS), tl.arange(0, SPAN)
    HALF: tl.constexpr = (PAIRS + 1) // 2  # of the other pairs, so that comparisons have registers
    found = tl.load(ids + pair, mask=pair < pairs, other=-1, cache_modifier=".cg")
    mine = tl.where(found < 0, SPAN, found) * PAIRS + pair  # pairs of no expert come last
    at, first = tl.zeros([PAIRS], tl.int32), tl.zeros([SPAN], tl.int32)
    for start in range(0, PAIRS, HALF):
        other = start + tl.arange(0, HALF)
        theirs = tl.load(ids + other, mask=other < pairs, other=-1, cache_modifier=".cg")
        theirs = tl.where(theirs < 0, SPAN, theirs) * PAIRS + other
        at += tl.sum((theirs[None, :] < mine[:, None]).to(tl.int32), 1)
        first += tl.sum((theirs[None, :] < span[:, None] * PAIRS).to(tl.int32), 1)
    tl.store(order + at, pair, mask=found >= 0)
    tl.store(starts + span, first, mask=span < EXPERTS)
    tl.store(starts + EXPERTS, tl.sum((found >= 0).to(tl.int32), 0))
