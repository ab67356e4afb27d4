"""Parts of attention over contexts that lie on several ranks: sums of latents, with their log-sum-exps in their bytes.

So one exchange between ranks moves both.
"""

import torch
from torch import Tensor

from quire.kernels.latent_rows import TAIL


def packed_parts(sums: Tensor, lse: Tensor, ranks: int) -> Tensor:
    """Return what a rank computed for the heads of each rank, [ranks, T, H / ranks, L + W].

    sums   [T, H, L]: heads of all ranks, those of a rank together;  lse  [T, H] float32
    W      values of the type of `sums` in TAIL bytes, of which the lse has the first
    """
    (rows, heads, width), words = sums.shape, TAIL // sums.element_size()
    packed = sums.new_empty(ranks, rows, heads // ranks, width + words)
    to_sums, to_lse = split_parts(packed)
    to_sums.copy_(sums.unflatten(1, (ranks, -1)).transpose(0, 1))
    to_lse.copy_(lse.unflatten(1, (ranks, -1)).transpose(0, 1))
    return packed


def split_parts(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums [N, T, H, L] and log-sum-exps [N, T, H] float32 of parts [N, T, H, L + W], as views."""
    width = parts.shape[3] - TAIL // parts.element_size()
    return parts[..., :width], parts[..., width:].view(torch.float32)[..., 0]
