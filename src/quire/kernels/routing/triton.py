"""Routing in one kernel: one program of one warp per token.

Each score becomes a 64-bit key, and the program takes the largest key k times. The high half of a key is the score's
bits, changed so that they order as integers; the low half is the expert's number, counted from the end. So all keys
differ, the lower expert wins among equal scores, and NaN scores choose k different experts, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.args.experts import Routing
from quire.kernels import pdl
from quire.kernels.linear.gemv import bucket
from quire.kernels.routing import Scores, normed
from quire.kernels.triton_runtime import jit, tl


def route(
    logits: Tensor,
    correction: Tensor | None,
    routing: Routing,
    live: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts from router logits; return weights and ids. See `quire.kernels.routing`."""
    rows, k = logits.shape[0], routing.top_k
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if rows:
        in_pdl = pdl.in_use()
        size = routing.num_experts // routing.num_groups
        _route_kernel[(rows,)](
            logits,
            correction,
            live,
            expert_scale,
            weights,
            ids,
            logits.stride(0),
            routing.normalize_eps,
            routing.scaling,
            k,
            bucket(k),
            routing.num_experts,
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
            num_warps=1,
            **pdl.options(in_pdl),
        )
    return weights, ids


def route_normed(
    x: Tensor,
    norm: tuple[Tensor, float],
    scores: Scores,
    routing: Routing,
    live: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]] | None:
    """Norm x, score it and choose its experts in one kernel; None: it is not for x. See `quire.kernels.routing`."""
    if not isinstance(scores.weight, Tensor) or not normed.takes(x, norm[0], scores, routing):
        return None
    return normed.route(x, norm, scores, routing, live)


@jit
def _turn(bits):
    """Convert the bits of a float32 to an int32 of the same order, or back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _key(score, last):
    """Return the key of a score: the score in the high half, `last` in the low half."""
    return (_turn(score.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | last.to(tl.int64)


@jit
def _score(key):
    """Return the score of a key."""
    return _turn((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@jit
def _route_kernel(
    logits,
    correction,
    live,
    expert_scale,
    weights,
    ids,
    stride,
    eps,
    scaling,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
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
    """Choose the K experts of a token and their weights. Grid (tokens,).

    logits               [T, EXPERTS], any float type; stride  elements from token to token
    correction           [EXPERTS] float32, added to scores for the choice alone; or None
    expert_scale              [EXPERTS] float32, of the weights; or None
    live                 [T] bool, False: the token's ids are -1; or None
    weights, ids         [T, K] float32 and int32, contiguous, outputs
    eps, scaling         added to the sum of weights before dividing by it; factor of the weights
    K, WIDTH             experts of a token; padded to a power of two
    GROUPS, G            groups of experts; padded to a power of two
    SIZE, S              experts of a group; padded to a power of two
    TOP_GROUPS           groups whose experts may be chosen; only used if GROUPS > 1
    SOFTMAX              scores by softmax over all experts, else by sigmoid
    TOP2                 a group's score is the sum of its two largest scores, else the largest
    NORMALIZE            weights of a token are divided by their sum
    BY_LOGITS            experts are chosen by logits, not by scores
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    NEVER: tl.constexpr = -(2**63)
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, G)[:, None], tl.arange(0, S)[None, :]
    expert = group * SIZE + member
    there = (group < GROUPS) & (member < SIZE)
    logit = tl.load(logits + row * stride + expert, mask=there, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        score = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    else:
        score = 1 / (1 + tl.exp(-logit))
    chosen = logit if BY_LOGITS else score
    if correction is not None:
        chosen += tl.load(correction + expert, mask=there, other=0.0)
    last = EXPERTS - 1 - expert
    key = tl.where(there, _key(chosen, last), NEVER)
    if GROUPS > 1:
        first = tl.max(key, 1, keep_dims=True)
        best = _score(first)
        if TOP2:
            best += _score(tl.max(tl.where(key == first, NEVER, key), 1, keep_dims=True))
        rank = tl.where(group < GROUPS, _key(best, GROUPS - 1 - group), NEVER)
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            found = rank == tl.max(rank, 0, keep_dims=True)
            kept = kept | found
            rank = tl.where(found, NEVER, rank)
        key = tl.where(kept | (key == NEVER), key, _key(tl.full([1, 1], float("-inf"), tl.float32), last))
    col = tl.arange(0, WIDTH)
    weight, name = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.int32)
    for j in tl.static_range(K):
        most = tl.max(tl.max(key, 1), 0)
        picked = EXPERTS - 1 - (most & 0xFFFFFFFF).to(tl.int32)
        if correction is not None or BY_LOGITS:
            value = tl.sum(tl.sum(tl.where(key == most, score, 0.0), 1), 0)
        else:
            value = _score(most)
        weight, name = tl.where(col == j, value, weight), tl.where(col == j, picked, name)
        key = tl.where(key == most, NEVER, key)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + eps)
    weight *= scaling
    if expert_scale is not None:
        weight *= tl.load(expert_scale + name, mask=col < K, other=0.0)
    tl.store(weights + row * K + col, weight, mask=col < K)
    if live is not None:
        name = tl.where(tl.load(live + row), name, -1)
    tl.store(ids + row * K + col, name, mask=col < K)
