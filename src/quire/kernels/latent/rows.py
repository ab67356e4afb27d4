"""Rows of an FP8 cache of latents (fp8_ds_mla) in PyTorch: views of its parts, and the rule of writing and reading.

scale = largest magnitude of a tile / 448;  code = round(number / scale), to the nearest, ties to even;  NaN stays NaN
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels.attention.eight_bits import MOST, gather
from quire.kernels.latent import LatentView
from quire.kernels.latent_rows import TILE, latent_row

LEAST = torch.finfo(torch.float32).tiny  # the smallest scale


def row_view(rows: Tensor, kv_rank: int, rope_dim: int, **more: Any) -> LatentView:
    """Return the view of a cache of rows, uint8 [num_blocks, 1, block_size, bytes of a row]; `more`: its fields."""
    layout = latent_row(kv_rank, rope_dim)
    assert rows.shape[3] == layout.size and rows.dtype == torch.uint8, "a cache of other rows"
    latent = rows[..., :kv_rank].view(torch.float8_e4m3fn)
    scales = rows[..., layout.scales : layout.rope].view(torch.float32)
    return LatentView(latent, rows[..., layout.rope :].view(torch.bfloat16), scales=scales, **more)


def write_rows(latent: Tensor, rope: Tensor, cache: LatentView, kv_slots: Tensor) -> None:
    """Write latents [T, L] and rotated keys [T, R] to their slots of a cache of rows."""
    assert cache.scales is not None, "a cache of rows"
    place, width = (kv_slots // cache.block_size, 0, kv_slots % cache.block_size), latent.shape[1]
    tiles = torch.nn.functional.pad(latent.float(), (0, -width % TILE)).unflatten(1, (-1, TILE))
    most = MOST[cache.latent.dtype]
    scales = (tiles.abs().amax(2, keepdim=True) / most).clamp(min=LEAST)
    codes = (tiles / scales).clamp(-most, most).flatten(1)[:, :width].to(cache.latent.dtype)
    cache.latent.view(torch.uint8)[place] = codes.view(torch.uint8)
    cache.scales[place] = scales[:, :, 0]
    cache.rope[place] = rope.to(torch.bfloat16)


def numbers(cache: LatentView, index: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return latents [..., L] and rotated keys [..., R] at an index of blocks, or of blocks and tokens, in float32."""
    at = (index, 0) if isinstance(index, Tensor) else (index[0], 0, *index[1:])
    latent, rope = gather(cache.latent, at).float(), gather(cache.rope, at).float()
    if cache.scales is None:
        return latent * cache.scale, rope * cache.scale
    scales = cache.scales[at].repeat_interleave(TILE, -1)
    return latent * scales[..., : latent.shape[-1]], rope
