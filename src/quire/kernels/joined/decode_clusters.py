"""Norm, rotation, cache write and attention of decodes in one kernel in CUDA C++, for few rows on Hopper.

A cluster of blocks has a sequence and a KV head. It copies the context's keys and values to shared memory before it
waits for the projection, and adds up its parts through the shared memory of its blocks, where `decode_attention` takes
a trip to memory and a counter. `decode_clusters.cu` says how. The order of sums depends on the tiling and on the
context's length alone.
"""

import functools
import math
from ctypes import Structure, c_float, c_int, c_longlong, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.cuda_source import CudaKernel, CudaSource
from quire.kernels.joined import CLUSTER_DIMS
from quire.kernels.joined.inputs import HeadInputs, few_decodes

SOURCE = Path(__file__).with_name("decode_clusters.cu")
PIECE = 16  # tokens that a warp takes at a time
REGISTERS = {1: 104, 2: 184}  # of a thread, by lanes / 8: with fewer some are spilled, with more fewer blocks fit
LOG2E = math.log2(math.e)


class Tiling(NamedTuple):
    """The tiling of the kernel.

    blocks   of a cluster
    warps    of a block
    stages   pieces of a warp that are in shared memory at a time
    """

    blocks: int
    warps: int
    stages: int


TILING = Tiling(8, 8, 2)  # for at most 16 clusters, with short and with long contexts


class _Args(Structure):
    """`Args` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "norm", "cos", "sin", "slots", "out", "k", "v")),
        *((name, c_void_p) for name in ("table", "starts", "lengths", "table_rows", "sinks")),
        *((f"stride_{name}", c_longlong) for name in ("qkv", "out", "block", "head", "token", "table")),
        *(("eps", c_float), ("scale", c_float), ("window", c_int), ("kv_heads", c_int), ("first", c_int)),
    )


def fits(qkv: Tensor, kv: KVView, meta: AttentionMeta) -> bool:
    """Return True if `attention` can take the projection qkv [T, Hq + 2 Hkv, D] of a step."""
    fine = qkv.dtype in (torch.bfloat16, torch.float16) and kv.block_size % PIECE == 0
    return fine and qkv.shape[2] in CLUSTER_DIMS and few_decodes(qkv, kv, meta)


def attention(
    qkv: Tensor,
    heads: HeadInputs,
    kv: KVView,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write the step's keys and values to `kv`, and return the attention [T, Hq, D] of its queries.

    qkv [T, Hq + 2 Hkv, D] is the projection; for the other arguments see `quire.kernels.attention`. Chunks (a window
    below 0) and soft_cap are not for this kernel.
    """
    assert soft_cap is None and (window or 0) >= 0 and isinstance(meta.seq_lens, Tensor)
    tokens, _, dim = qkv.shape
    k, kv_heads, sequences = kv.k, kv.k.shape[1], meta.seq_lens.shape[0]
    own, rows = qkv.shape[1] - 2 * kv_heads, meta.max_query_len or 1
    out = torch.empty((tokens, own, dim), dtype=qkv.dtype, device=qkv.device)
    tiling, group = TILING, own // kv_heads
    wide = heads.norm is not None and heads.norm.dtype == torch.float32
    kernel = kernel_of((dim, group, rows, kv.block_size), tiling, qkv.dtype, wide)
    tensors = qkv, heads.norm, heads.cos, heads.sin, meta.kv_slots, out, k, kv.v
    tables = meta.block_tables, meta.query_start, meta.seq_lens, meta.table_rows, sinks
    args = _Args(
        *(None if one is None else one.data_ptr() for one in (*tensors, *tables)),  # type: ignore[union-attr]
        *(qkv.stride(0), out.stride(0), *k.stride()[:3], meta.block_tables.stride(0)),
        *(heads.eps, scale * LOG2E, window or 0, kv_heads, int(__name__ not in meta.plans)),
    )
    meta.plans[__name__] = True
    kernel.launch(
        (tiling.blocks * kv_heads, sequences),
        (tiling.warps * 32,),
        [args],
        shared_bytes=shared_bytes(dim, group * rows, tiling),
        cluster=(tiling.blocks,),
        pdl=pdl.in_use(),
    )
    return out


def shared_bytes(dim: int, lanes: int, tiling: Tiling) -> int:
    """Return the dynamic shared memory of a block: pieces, the step's tokens and queries, sums, and their barrier."""
    tile, even, units = PIECE * dim * 2, -(-lanes // 2) * 2, tiling.blocks * tiling.warps
    rings = tiling.warps * tiling.stages * 2 * tile
    return rings + 3 * tile + units * (even * dim // tiling.blocks + 2) * 4 + units * even * 8 + 8


@functools.cache
def kernel_of(shape: tuple[int, int, int, int], tiling: Tiling, dtype: torch.dtype, wide_norm: bool) -> CudaKernel:
    """Return the kernel for a shape, a tiling, and types of the heads and of the norm's weights.

    shape   head size, query heads of a KV head, most rows of a sequence, tokens of a block of the cache
    """
    dim, group, rows, size = shape
    defines = {"D": dim, "GROUP": group, "ROWS": rows, "SIZE": size, "REGISTERS": REGISTERS[-(-group * rows // 8)]}
    defines |= {"CLUSTER": tiling.blocks, "WARPS": tiling.warps, "STAGES": tiling.stages}
    defines |= {"HALF": int(dtype == torch.float16), "WIDE_NORM": int(wide_norm)}
    return CudaSource(SOURCE, defines).kernel("decode_clusters")
