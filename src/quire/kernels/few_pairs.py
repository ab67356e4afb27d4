"""Two kernels of `experts/triton.py` for few tokens: each pair of a token and one of its experts by itself.

Shared experts, which every token goes through, run in the same kernels.
"""

from __future__ import annotations

from quire.kernels.activation.triton import gated_of, pointwise_of
from quire.kernels.linear.gemv import prefetch
from quire.kernels.triton_runtime import jit, tl


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
    shared,
    ids,
    expert_map,
    h,
    stride,
    tokens,
    SHARED: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The activation of BLOCK_N outputs of a pair. Grid (pairs, ceil(N / BLOCK_N)).

    With shared experts BLOCK_N is 1, and the grid (T * (SHARED + TOP_K * N),): an output of each token, then the next.
    Those of shared experts come first: they do not wait for ids, and bring their weights to the L2 cache meanwhile.

    x                  [T, K];  stride  elements from token to token
    gate_up, bias      [experts, 2 N, K] contiguous, gate first; [experts, 2 N] or None. ACT "relu2": N rows of each
    shared, SHARED     [2 SHARED, K] contiguous, gate first, of SHARED outputs; None, 0: no shared experts
    ids, expert_map    [T, TOP_K] int32; [all experts] int32 or None, see `quire.kernels.experts`
    h                  [pairs, N] contiguous, output; rows of pairs of other ranks are not written. [T, SHARED] follows
    tokens             T with shared experts
    N, K               outputs I and inputs H of an expert;  BLOCK_K  inputs of an iteration
    ACT                see `gated_of`, or "relu2", which has no gate
    """
    GATED: tl.constexpr = ACT != "relu2"
    AHEAD: tl.constexpr = 2 * BLOCK_K if BLOCK_K >= 64 else 64
    pair, number = tl.program_id(0), tl.program_id(1)
    token, routed = pair // TOP_K, pair >= 0
    if SHARED:
        token = tl.program_id(0) % tokens
        row = tl.program_id(0) // tokens  # of shared experts, as long as it is below SHARED
        routed = row >= SHARED
        pair = token * TOP_K + (row - SHARED) % TOP_K
        number = tl.where(routed, (row - SHARED) // TOP_K, 0)
        if PDL:
            if row < SHARED:
                rows = row + tl.arange(0, 1 << GATED) * SHARED
                prefetch(shared, rows, SHARED << GATED, K, 1 << GATED, AHEAD)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # ids are there, so the next kernel may read weights before it waits
    place = _place(ids, expert_map, pair, routed)
    if (place < 0) & routed:
        return
    weight = gate_up + place.to(tl.int64) * (N * K << GATED)
    to = pair.to(tl.int64) * N
    beside = N * K  # elements from a row of gate to that of up
    if SHARED:
        weight = tl.where(routed, weight, shared + row.to(tl.int64) * K)
        to = tl.where(routed, to, tokens * (TOP_K * N) + token * SHARED + row)
        beside = tl.where(routed, beside, SHARED * K)
    col = number * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)[None, :]
    at = weight + tl.minimum(col, N - 1)[:, None] * K + lane
    source = x + token.to(tl.int64) * stride + lane
    gate_tile = tl.load(at, mask=lane < K, other=0.0, eviction_policy="evict_first")
    up_tile = gate_tile
    if GATED:
        up_tile = tl.load(at + beside, mask=lane < K, other=0.0, eviction_policy="evict_first")
    gate, up = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32), tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for start in range(0, K, BLOCK_K):
        given = tl.load(source + start, mask=start + lane < K, other=0.0).to(tl.float32)
        gate_now, up_now = gate_tile.to(tl.float32), up_tile.to(tl.float32)
        more = start + BLOCK_K + lane < K
        gate_tile = tl.load(at + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        if GATED:
            up_tile = tl.load(at + beside + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
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
    tl.store(h + to + col, value.to(h.dtype.element_ty), mask=col < N)


@jit
def _few_down_kernel(
    h,
    down,
    bias,
    shared,
    ids,
    expert_map,
    weights,
    residual,
    y,
    SHARED: tl.constexpr,
    TOP_K: tl.constexpr,
    J: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of a token: weighted sum over its experts of down times h. Grid (tokens, ceil(N / BLOCK_N)).

    h                  [pairs, K] contiguous, then [T, SHARED] of shared experts
    down, bias         [experts, N, K] contiguous; [experts, N] or None
    shared, SHARED     [N, SHARED] contiguous, down of shared experts with SHARED inputs; None, 0: there are none
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
    if SHARED and PDL:
        prefetch(shared, col, N, SHARED, BLOCK_N, J * BLOCK_K if J * BLOCK_K >= 64 else 64)
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
    if SHARED:
        part = turn * BLOCK_K + lane
        at = shared + tl.minimum(col, N - 1)[None, :, None] * SHARED + part
        h += tl.num_programs(0) * (TOP_K * K) + token * SHARED
        for start in range(0, SHARED, J * BLOCK_K):  # a turn takes BLOCK_K of the inputs of an iteration
            tile = tl.load(at + start, mask=start + part < SHARED, other=0.0, eviction_policy="evict_first")
            given = tl.load(h + start + part, mask=start + part < SHARED, other=0.0).to(tl.float32)
            acc += tl.sum(tl.reshape(tile.to(tl.float32) * given, [J, BLOCK_N, BLOCK_K // 8, 8]), 3)
    out = tl.sum(tl.sum(acc, 2), 0)
    if bias is not None:
        own = tl.reshape(place, [J, 1])
        at = bias + own.to(tl.int64) * N + col[None, :]
        biases = tl.load(at, mask=(own >= 0) & (col < N)[None, :], other=0.0).to(tl.float32)
        out += tl.sum(biases * tl.reshape(weight, [J, 1]), 0)
    if residual is not None:
        out += added.to(tl.float32)
    tl.store(y + to, out.to(y.dtype.element_ty), mask=col < N)
