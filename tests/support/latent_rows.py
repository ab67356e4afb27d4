"""Caches of rows (fp8_ds_mla) made of other caches of latents, for tests of the kernels that read them."""

import torch

from quire.kernels.latent import LatentView
from quire.kernels.latent.rows import numbers, row_view, write_rows
from quire.kernels.latent_rows import latent_row


def coded(cache: LatentView, layers: int = 3) -> tuple[LatentView, LatentView]:
    """Return a cache of rows with the numbers of another, and one in float32 with what the rows hold.

    The rows are the last layer's of pages with `layers` layers. Tokens that are NaN in the other cache have bytes 255:
    their scales are NaN.
    """
    (blocks, _, size, width), turned, device = cache.latent.shape, cache.rope.shape[3], cache.latent.device
    shape = blocks, layers, 1, size, latent_row(width, turned).size
    rows = row_view(torch.full(shape, 255, dtype=torch.uint8, device=device)[:, -1], width, turned)
    written = (~cache.latent.isnan().any(-1)).flatten().nonzero()[:, 0]
    write_rows(cache.latent.flatten(0, 2)[written], cache.rope.flatten(0, 2)[written], rows, written)
    latent, rope = (side[:, None] for side in numbers(rows, torch.arange(blocks, device=device)))
    return rows, LatentView(latent, rope)
