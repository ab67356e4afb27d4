"""The choice of tokens in C: scores of keys in tiles, with a running choice for each row; native.c has the C code."""

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta
from quire.kernels.attention.eight_bits import MOST, is_coded
from quire.kernels.index import Chosen, IndexView
from quire.kernels.index.ref import keep_last, prepare, reuse, room
from quire.kernels.native.library import loaded

__all__ = ["choose", "keep_last", "prepare", "reuse", "room"]

ROWS, KEYS = 4, 32  # INDEX_ROWS and INDEX_KEYS of native.c
LEAST_PART = 1024  # keys of a part of a context: fewer cost less than joining parts
MOST_PARTS = 32  # of a context: a thread joins the candidates of all
TYPES = (torch.float32, torch.bfloat16)


def choose(q: Tensor, weights: Tensor, cache: IndexView, meta: AttentionMeta, top_k: int) -> Chosen:
    """Return the best tokens of each row. See `quire.kernels.index`.

    A score has the same bits whatever rows, parts and threads compute it, so equal keys have equal scores.
    """
    chosen, threads = room(len(q), meta, top_k, q.device), torch.get_num_threads()
    found, positions = chosen.sequences, chosen.positions
    rows = len(positions)
    if not found:
        return chosen
    q, weights = q.contiguous(), weights.contiguous()
    _check(q, weights, cache, meta)
    items, num_parts = _items(found, meta, threads)
    (_, heads, dim), tables = q.shape, meta.block_tables
    kept = max(2, num_parts) * top_k
    scratch_bytes = 8 * (2 * kept + (ROWS - 1) * 2 * top_k) + 4 * dim * (2 * KEYS + ROWS * heads)
    scratch_bytes += -scratch_bytes % 64
    scratch = torch.empty(threads, scratch_bytes, dtype=torch.uint8)
    parts = torch.empty(rows if num_parts > 1 else 0, num_parts, top_k, dtype=torch.int64)
    counts = torch.zeros(parts.shape[:2], dtype=torch.int64)
    coded = cache.scales is not None
    codes = torch.arange(256, dtype=torch.uint8).view(cache.keys.dtype).float() if coded else None
    loaded().quire_index(
        q.data_ptr(),
        weights.data_ptr(),
        cache.keys.data_ptr(),
        None if cache.scales is None else cache.scales.data_ptr(),
        None if codes is None else codes.data_ptr(),
        tables.data_ptr(),
        items.data_ptr(),
        positions.data_ptr(),
        parts.data_ptr(),
        counts.data_ptr(),
        scratch.data_ptr(),
        len(items),
        rows,
        heads,
        dim,
        top_k,
        cache.block_size,
        cache.keys.stride(0),
        0 if cache.scales is None else cache.scales.stride(0),
        tables.stride(0),
        num_parts,
        kept,
        scratch_bytes,
        q.dtype == torch.bfloat16,
        cache.keys.dtype == torch.bfloat16,
        threads,
    )
    return Chosen(found, positions)


def _items(found: tuple[tuple[int, int, int, int], ...], meta: AttentionMeta, threads: int) -> tuple[Tensor, int]:
    """Return the items of the C code [n, 8], and the number of parts into which each context is divided."""
    tiles = sum(-(-(last - first) // ROWS) for first, last, *_ in found)
    longest = max(past + last - first for first, last, _, past in found)
    num_parts = max(1, min(-(-2 * threads // tiles), longest // LEAST_PART, MOST_PARTS)) if tiles < 2 * threads else 1
    items, place = list[tuple[int, ...]](), 0
    for first, last, s, past in found:
        table = s if meta.table_rows is None else int(meta.table_rows[s])
        for row in range(first, last, ROWS):
            rows, position = min(ROWS, last - row), past + row - first
            each = -(-(position + rows) // num_parts)
            for part in range(num_parts):
                begin, end = part * each, min((part + 1) * each, position + rows)
                items.append((row, rows, table, position, begin, max(begin, end), place, part))
            place += rows
    return torch.tensor(items, dtype=torch.int64), num_parts


def _check(q: Tensor, weights: Tensor, cache: IndexView, meta: AttentionMeta) -> None:
    """Check types, shapes and strides, which the C code does not check; raise ValueError."""
    keys, scales, tables = cache.keys, cache.scales, meta.block_tables
    rows, heads, dim = q.shape
    if q.dtype not in TYPES or weights.dtype != torch.float32 or weights.shape != (rows, heads):
        raise ValueError(
            f"native index: q must be float32 or bfloat16, and weights float32 {(rows, heads)}; they are {q.dtype} "
            f"{tuple(q.shape)} and {weights.dtype} {tuple(weights.shape)}"
        )
    coded = is_coded(keys)
    if keys.dtype not in (*TYPES, *MOST) or coded != (scales is not None) or keys.shape[1::2] != (1, dim):
        raise ValueError(
            f"native index: keys must be float32 or bfloat16 [., 1, ., {dim}], or codes with scales; they are "
            f"{keys.dtype} {tuple(keys.shape)}, {'with' if scales is not None else 'without'} scales"
        )
    if keys.stride()[2:] != (dim, 1) or (scales is not None and (scales.dtype, scales.stride(2)) != (torch.float32, 1)):
        raise ValueError("native index: keys and their scales must be contiguous inside a block, and scales float32")
    if tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError(f"native index: block tables must be int32, contiguous inside a row; they are {tables.dtype}")
