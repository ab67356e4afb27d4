"""Latent attention on a CPU: to chosen tokens in C (native.c), to all tokens as in `cpu.py`."""

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, sequences
from quire.kernels.attention.eight_bits import is_coded
from quire.kernels.latent import LatentView
from quire.kernels.latent.cpu import absorbed, expanded, join, prepare, project
from quire.kernels.latent.layouts import check_queries
from quire.kernels.native.library import loaded

__all__ = ["absorbed", "chosen", "expanded", "join", "prepare", "project"]

KEYS = 32  # CHOSEN_KEYS of native.c
KINDS = {torch.float32: 0, torch.bfloat16: 1}  # types of the cache; codes are 2


def chosen(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentView,
    meta: AttentionMeta,
    scale: float,
    positions: Tensor,
    first: int = 0,
) -> Tensor:
    """Return softmax-weighted sums of the latents at `positions` [N, H, L]. See `quire.kernels.latent`."""
    check_queries(q_latent, q_rope)
    q, latent, rope, scales = torch.cat((q_latent, q_rope), 2), cache.latent, cache.rope, cache.scales
    _check(q, cache, meta, positions)
    (rows, heads, width), threads = q.shape, torch.get_num_threads()
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    table_rows = torch.zeros(rows, dtype=torch.int64)
    for start, last, s, _ in sequences(meta):
        own = slice(max(start - first, 0), max(min(last - first, rows), 0))
        table_rows[own] = s if meta.table_rows is None else int(meta.table_rows[s])
    parts = max(1, min(-(-threads // max(1, rows)), heads // 8))
    codes = torch.arange(256, dtype=torch.uint8).view(latent.dtype).float() if is_coded(latent) else None
    numbers = heads * (width + KEYS + latent.shape[3] + 2) + 2 * KEYS * width + 16
    scratch = torch.empty(threads, numbers, dtype=torch.float32)
    loaded().quire_chosen(
        q.data_ptr(),
        latent.data_ptr(),
        rope.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if codes is None else codes.data_ptr(),
        meta.block_tables.data_ptr(),
        table_rows.data_ptr(),
        positions.data_ptr(),
        out.data_ptr(),
        scratch.data_ptr(),
        rows,
        heads,
        latent.shape[3],
        rope.shape[3],
        positions.shape[1],
        cache.block_size,
        *_strides(latent),
        *_strides(rope),
        *((0, 0) if scales is None else _strides(scales)),
        meta.block_tables.stride(0),
        parts,
        4 * numbers,
        scale,
        cache.scale,
        KINDS.get(latent.dtype, 2),
        KINDS.get(rope.dtype, 2),
        q.dtype == torch.bfloat16,
        threads,
    )
    return out


def _strides(side: Tensor) -> tuple[int, int]:
    """Return bytes between blocks, and between tokens of a block."""
    return side.stride(0) * side.itemsize, side.stride(2) * side.itemsize


def _check(q: Tensor, cache: LatentView, meta: AttentionMeta, positions: Tensor) -> None:
    """Check types, shapes and strides, which the C code does not check; raise ValueError."""
    sides = [one for one in (cache.latent, cache.rope, cache.scales) if one is not None]
    if any(one.stride(3) != 1 and one.shape[3] > 1 for one in sides) or any(one.shape[1] != 1 for one in sides):
        raise ValueError(
            "native latent: the cache must be [., 1, ., .], contiguous inside a token; its strides are "
            f"{[one.stride() for one in sides]}"
        )
    kinds = [KINDS.get(one.dtype, 2 if is_coded(one) else -1) for one in sides[:2]]
    scaled = cache.scales is None or (cache.scales.dtype == torch.float32 and kinds[0] == 2)
    if (
        q.dtype not in KINDS
        or min(kinds) < 0
        or not scaled
        or (kinds[1] == 2 and cache.rope.dtype != cache.latent.dtype)
    ):
        raise ValueError(
            f"native latent: q, latents and rotated keys must be float32, bfloat16 or codes of one type, and scales "
            f"float32; they are {q.dtype} and {[one.dtype for one in sides]}"
        )
    if positions.dtype != torch.int32 or not positions.is_contiguous() or len(positions) != len(q):
        raise ValueError(
            f"native latent: positions must be contiguous int32 [{len(q)}, .]; they are {positions.dtype} "
            f"{tuple(positions.shape)}"
        )
    if meta.block_tables.dtype != torch.int32 or meta.block_tables.stride(1) != 1:
        raise ValueError(f"native latent: block tables must be int32; they are {meta.block_tables.dtype}")
