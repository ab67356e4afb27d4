"""Norm, router and choice of experts of few rows in one kernel in CUDA C++, on Hopper.

A cluster of blocks has a row. Three kernels in Triton do the same (norm, product, `route`), which cost a launch each;
`normed.cu` says how. The order of sums depends on the shapes alone. Floor: the router's bytes over 4.3 TB/s, 0.1 us for
128 experts of 2,048 inputs.
"""

from __future__ import annotations

import functools
from ctypes import Structure, c_float, c_longlong, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from quire.args.experts import Routing
from quire.kernels import pdl
from quire.kernels.cuda_source import CudaKernel, CudaSource, runs_on_hopper
from quire.kernels.routing import Scores
from quire.kernels.routing_plan import MOST_ROWS, Tiling, tiling_of, why_not

SOURCE = Path(__file__).with_name("normed.cu")
ENABLED = True


class _Args(Structure):
    """`Args` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "norm", "weight", "bias", "correction", "factors", "live")),
        *((name, c_void_p) for name in ("normed", "weights", "ids")),
        ("stride", c_longlong),
        *((name, c_float) for name in ("eps", "sum_eps", "scaling")),
    )


def takes(x: Tensor, norm: Tensor, scores: Scores, routing: Routing) -> bool:
    """Return True if the kernel takes rows x [T, K] in bfloat16, with a norm and a router of that dtype."""
    weight, bias = scores.weight, scores.bias
    if not ENABLED or not 0 < len(x) <= MOST_ROWS or why_not(routing, x.shape[1]) or not runs_on_hopper(x.device):
        return False
    if any(one is not None and one.dtype != torch.bfloat16 for one in (x, norm, weight, bias)):
        return False
    if any(one is not None and one.dtype != torch.float32 for one in (scores.correction, scores.factors)):
        return False
    aligned = all(one.data_ptr() % 16 == 0 for one in (x, norm, weight)) and x.stride(0) % 8 == 0
    return aligned and x.stride(1) == 1 and weight.is_contiguous()


def route(
    x: Tensor, norm: tuple[Tensor, float], scores: Scores, routing: Routing, live: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the norm of x [T, K], and weights and ids of each row's experts as `quire.kernels.routing` says.

    norm   weight [K] and eps of the RMS norm that the router reads
    """
    rows, picks = len(x), routing.top_k
    normed, ids = (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(rows, picks, dtype=torch.int32),
    )
    weights = x.new_empty(rows, picks, dtype=torch.float32)
    tensors = x, norm[0], *scores[:4], live, normed, weights, ids
    args = _Args(
        *(None if one is None else one.data_ptr() for one in tensors),
        *(x.stride(0), norm[1], routing.normalize_eps, routing.scaling),
    )
    assert routing.correction == (scores.correction is not None)
    tiling = tiling_of(x.shape[1], routing.num_experts)
    assert tiling is not None, "`why_not` says for which routers there is one"
    kernel_of(x.shape[1], routing, scores.exact).launch(
        (tiling.blocks, rows),
        (tiling.warps * 32,),
        [args],
        shared_bytes=shared_bytes(x.shape[1], routing.num_experts, tiling),
        cluster=(tiling.blocks,),
        pdl=pdl.in_use(),
    )
    return normed, (weights, ids)


def shared_bytes(inputs: int, experts: int, tiling: Tiling) -> int:
    """Return the dynamic shared memory of a block: the row, all logits and their barrier, and sums of warps."""
    return inputs * 2 + -(-experts // 2) * 8 + 8 + tiling.warps * 4


@functools.cache
def kernel_of(inputs: int, routing: Routing, exact: bool) -> CudaKernel:
    """Return the kernel of a router that `why_not` has nothing against. exact: logits stay float32"""
    tiling, softmax = tiling_of(inputs, routing.num_experts), routing.scoring == "softmax"
    assert tiling is not None
    cancels = routing.normalize and not routing.normalize_eps and not routing.correction
    defines: dict[str, int | str] = {"K": inputs, "EXPERTS": routing.num_experts, "PICKS": routing.top_k}
    defines |= {"CLUSTER": tiling.blocks, "WARPS": tiling.warps, "EXACT": int(exact)}
    defines |= {"SOFTMAX": int(softmax), "TOTAL": int(softmax and not cancels), "NORMALIZE": int(routing.normalize)}
    defines |= {"CORRECTED": int(routing.correction), "KEY": "u64" if exact or routing.correction else "u32"}
    return CudaSource(SOURCE, defines).kernel("normed_router")
