"""Caches of rows (fp8_ds_mla) made of other caches of latents, for tests of the kernels that read them."""

import torch

from quire.kernels.latent import LatentView
from quire.kernels.latent.rows import numbers, row_view, write_rows
from quire.kernels.latent_rows import latent_row


def coded(cache: LatentView) -> tuple[LatentView, LatentView]:
    """Return a cache of rows with the numbers of another, and one in float32 with what the rows hold.

    The rows lie in larger pages. Tokens that are NaN in the other cache have bytes 255: their scales are NaN.
    """
    (blocks, _, size, width), turned = cache.latent.shape, cache.rope.shape[3]
    raw = torch.full((blocks, 3, 1, size, latent_row(width, turned).size), 255, dtype=torch.uint8)
    rows = row_view(raw[:, 1].to(cache.latent.device), width, turned)
    written = (~cache.latent.isnan().any(-1)).flatten().nonzero()[:, 0]
    write_rows(cache.latent.flatten(0, 2)[written], cache.rope.flatten(0, 2)[written], rows, written)
    every = torch.arange(blocks, device=cache.latent.device)
    latent, rope = (side[:, None] for side in numbers(rows, every))
    return rows, LatentView(latent, rope)
