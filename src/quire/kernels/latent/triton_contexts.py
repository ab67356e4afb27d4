"""Contexts of prompts as numbers: latents that rows choose many times are made of codes once, and not for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta
from quire.kernels.attention.eight_bits import is_coded
from quire.kernels.attention.triton_contexts import context_blocks, count_blocks
from quire.kernels.latent import LatentView
from quire.kernels.latent.triton_rows import widen

READ = 4  # times that rows read a token, at least, for numbers to be made before


def plain_contexts(
    cache: LatentView, meta: AttentionMeta, rows: range, top_k: int, dtype: torch.dtype, room: int
) -> tuple[LatentView, Tensor] | None:
    """Return a cache of numbers for the prompts in `rows`, and its block table; None: it gains nothing.

    rows    of the step; each reads `top_k` tokens. Decodes have no numbers made for them
    room    bytes. All are allocated where some are needed, so that a step with short contexts measures the memory of
            all steps
    The scale of all codes, if there is one, still counts.
    """
    some = tuple(prompt for prompt in meta.prompts or () if prompt[0] < rows.stop and prompt[1] > rows.start)
    size, width = cache.block_size, cache.latent.shape[3] + cache.rope.shape[3]
    count = sum(count_blocks(some, size))
    if not some or not is_coded(cache.latent) or count * size * width * dtype.itemsize > room:
        return None
    if len(rows) * top_k < READ * count * size:
        return None
    blocks, table = context_blocks(meta, some, size)
    every = blocks.repeat_interleave(size, output_size=count * size)
    offsets = torch.arange(size, device=blocks.device).repeat(count)
    space = torch.empty(room // dtype.itemsize, dtype=dtype, device=blocks.device)
    latent, rope = (side.view(count, 1, size, -1) for side in widen(cache, every, offsets, dtype, space))
    return LatentView(latent, rope, cache.scale), table
