"""Norm, rotation, cache write and latent attention of decodes in one kernel in CUDA C++, for few rows on Hopper.

A cluster of blocks has a sequence and a group of heads. It copies the cached latents to shared memory before it waits
for the queries, and adds up its parts through the shared memory of its blocks, where the Triton kernels are three
launches: `prepare`, `absorbed`, and the sum of its parts. `latent_clusters.cu` says how. The order of sums depends on
the tiling and on the context's length alone.
"""

import functools
import math
from ctypes import Structure, c_float, c_int, c_longlong, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention import AttentionMeta
from quire.kernels.attention.triton_plan import multiprocessors
from quire.kernels.cuda_source import CudaKernel, CudaSource
from quire.kernels.joined.choice import KEY_DIM, MOST_LATENT_CLUSTERS, latent_group
from quire.kernels.joined.inputs import HeadInputs, LatentInputs, decodes_alone
from quire.kernels.latent import LatentView

SOURCE = Path(__file__).with_name("latent_clusters.cu")
PIECE = 16  # tokens that a block takes in turn
REGISTERS = {4: 255, 8: 152, 16: 128}  # of a thread, by warps: with fewer some are spilled
LOG2E = math.log2(math.e)


class Tiling(NamedTuple):
    """The tiling of the kernel.

    blocks   of a cluster
    warps    of a block
    tile     tokens that a block takes at a time
    stages   so many times `tile` tokens are in shared memory
    """

    blocks: int
    warps: int
    tile: int
    stages: int


LARGE_CLUSTERS = 120  # with more multiprocessors one of the at most 8 groups (GPCs) of a GPU has 16 of them
# By most clusters of a step. With 16, 8, 64, 1 a step of one request is 0.6% faster after 512 tokens, and 5% slower
# after 7,900 (H200, docs/log.md).
TILINGS = {4: Tiling(16, 8, 64, 2), MOST_LATENT_CLUSTERS: Tiling(8, 8, 32, 3)}


class _Args(Structure):
    """`Args` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("absorbed", "q", "given", "norm", "cos", "sin", "slots", "out")),
        *((name, c_void_p) for name in ("latent", "rope", "table", "starts", "lengths", "table_rows")),
        *((name, c_longlong) for name in ("latent_block", "rope_block")),
        *((f"stride_{name}", c_int) for name in ("q", "given", "table")),
        *(("eps", c_float), ("scale", c_float), ("heads", c_int), ("width", c_int), ("first", c_int)),
    )


def fits(inputs: LatentInputs, norm: Tensor, kv: LatentView, meta: AttentionMeta) -> bool:
    """Return True if `attention` can take a step. norm: weight of the latents' norm"""
    if not decodes_alone(meta):
        return False
    (_, heads, _), dim = inputs.q.shape, norm.shape[0]
    q, given = inputs.q, inputs.given
    clusters = len(meta.seq_lens) * (heads // latent_group(heads, meta.max_query_len or 1))
    numbers = (q, given, norm, kv.latent, kv.rope)
    return (
        clusters <= MOST_LATENT_CLUSTERS
        and kv.scales is None
        and all(one.dtype == torch.bfloat16 and one.data_ptr() % 16 == 0 for one in numbers)
        and all(stride % 8 == 0 for stride in (*q.stride()[:2], given.stride(0)))
        and q.stride()[1:] == (q.shape[2], 1)
        and given.stride(1) == 1
        and kv.block_size % PIECE == 0
        and kv.rope.shape[3] == KEY_DIM
        and (kv.latent.stride(2), kv.rope.stride(2)) == (kv.latent.shape[3], KEY_DIM)
        and all(dim % max(256, 32 * one.warps, 16 * one.blocks) == 0 for one in TILINGS.values())
    )


def attention(
    absorbed: Tensor, inputs: LatentInputs, given: HeadInputs, kv: LatentView, meta: AttentionMeta, scale: float
) -> Tensor:
    """Write the step's latents and rotated keys to `kv`, and return the weighted sums of latents [T, H, L].

    absorbed [T, H, L] are the queries times the up-projection of keys; for the other arguments see
    `quire.kernels.latent`.
    """
    assert absorbed.is_contiguous() and given.norm is not None and isinstance(meta.seq_lens, Tensor)
    (_, heads, dim), sequences, rows = absorbed.shape, len(meta.seq_lens), meta.max_query_len or 1
    out, group = torch.empty_like(absorbed), latent_group(heads, rows)
    q, rows_given, groups = inputs.q, inputs.given, heads // group
    tiling = tiling_of(sequences * groups)
    kernel = kernel_of((dim, group, rows, kv.block_size), tiling)
    tensors = absorbed, q, rows_given, given.norm, given.cos, given.sin, meta.kv_slots, out, kv.latent, kv.rope
    tables = meta.block_tables, meta.query_start, meta.seq_lens, meta.table_rows
    args = _Args(
        *(None if one is None else one.data_ptr() for one in (*tensors, *tables)),  # type: ignore[union-attr]
        *(kv.latent.stride(0), kv.rope.stride(0), q.stride(0), rows_given.stride(0), meta.block_tables.stride(0)),
        *(given.eps, scale * LOG2E, heads, q.shape[2], int(__name__ not in meta.plans)),
    )
    meta.plans[__name__] = True
    kernel.launch(
        (tiling.blocks * groups, sequences),
        (tiling.warps * 32,),
        [args],
        shared_bytes=shared_bytes(dim, group * rows, tiling),
        cluster=(tiling.blocks,),
        pdl=pdl.in_use(),
    )
    return out


def tiling_of(clusters: int) -> Tiling:
    """Return the tiling of a step with so many clusters. A GPU may have no place for a cluster of 16 blocks."""
    large = multiprocessors() > LARGE_CLUSTERS
    return next(one for most, one in TILINGS.items() if clusters <= most and (large or one.blocks <= 8))


def shared_bytes(dim: int, lanes: int, tiling: Tiling) -> int:
    """Return the dynamic shared memory of a block: tokens, scores of warps or sums of blocks, probabilities, maxima."""
    tiles, tile = -(-lanes // 8), tiling.tile
    ring, scores = tiling.stages * tile * (dim + KEY_DIM) * 2, tiling.warps * tile * (tiles * 8 + 2) * 4
    return ring + max(scores, dim // 16 * tiles * 512) + 16 * (tile * 2 + 16) + 80 + tiling.blocks * tiles * 64


@functools.cache
def kernel_of(shape: tuple[int, int, int, int], tiling: Tiling) -> CudaKernel:
    """Return the kernel for a shape and a tiling.

    shape   width of latents, heads of a cluster, most rows of a sequence, tokens of a block of the cache
    """
    dim, group, rows, size = shape
    defines = {"L": dim, "GROUP": group, "ROWS": rows, "SIZE": size, "REGISTERS": REGISTERS.get(tiling.warps, 128)}
    defines |= {"CLUSTER": tiling.blocks, "WARPS": tiling.warps, "TILE": tiling.tile, "STAGES": tiling.stages}
    return CudaSource(SOURCE, defines).kernel("latent_clusters")
