"""Sums of latents over parts of contexts that lie on several ranks, added up by their log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention.triton_tiles import LOG2E
from quire.kernels.latent.parts import split_parts
from quire.kernels.latent.triton_rows import padded
from quire.kernels.triton_runtime import jit, tl


def join(parts: Tensor) -> Tensor:
    """Add up parts [N, T, H, L + W] of attention over divided contexts: [T, H, L]. See `quire.kernels.latent`."""
    assert parts.is_contiguous()
    sums, lse = split_parts(parts)
    count, rows, heads, width = sums.shape
    out = torch.empty(rows, heads, width, dtype=parts.dtype, device=parts.device)
    if rows:
        in_pdl = pdl.in_use()
        _join_kernel[(rows * heads,)](
            sums,
            lse,
            out,
            rows * heads,
            LOG2E,
            COUNT=count,
            COUNTP=padded(count),
            WIDTH=sums.stride(2),
            LSES=lse.stride(2),
            L=width,
            LP=padded(width),
            PDL=in_pdl,
            num_warps=2,
            **pdl.options(in_pdl),
        )
    return out


@jit(do_not_specialize=["lanes"])
def _join_kernel(
    sums,
    lse,
    out,
    lanes,
    log2e,
    COUNT: tl.constexpr,
    COUNTP: tl.constexpr,
    WIDTH: tl.constexpr,
    LSES: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the parts of a lane, always in the same order. Grid (lanes,): pairs of a row and a head.

    sums            [COUNT, lanes, L]; WIDTH  elements from lane to lane
    lse             [COUNT, lanes] float32, natural; -inf: the part has no tokens; LSES  elements from lane to lane
    out             [lanes, L], output; 0 if no part has tokens
    COUNTP, LP      COUNT and L, padded to powers of two
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lane = tl.program_id(0).to(tl.int64)
    part, dims = tl.arange(0, COUNTP), tl.arange(0, LP)
    known = tl.load(lse + (part * lanes.to(tl.int64) + lane) * LSES, mask=part < COUNT, other=float("-inf"))
    top = tl.max(known, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.sum(tl.exp2((known - top) * log2e), 0)
    total = tl.zeros([LP], tl.float32)
    for number in tl.static_range(COUNT):
        place = number * lanes.to(tl.int64) + lane
        share = tl.exp2((tl.load(lse + place * LSES) - top) * log2e)
        own = tl.load(sums + place * WIDTH + dims, mask=dims < L, other=0.0).to(tl.float32)
        total += tl.where(share == 0.0, 0.0, own * share)
    total = tl.where(weight == 0.0, 0.0, total / weight)
    tl.store(out + lane * L + dims, total.to(out.dtype.element_ty), mask=dims < L)
