"""Random steps over the keys of an indexer, for tests and measurements of its kernels."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, inputs
from quire.kernels.attention.inputs import Case
from quire.kernels.index import IndexView
from quire.kernels.index.ref import write_keys


def make(
    case: Case, dtype: torch.dtype, codes: torch.dtype | None = None
) -> tuple[Tensor, Tensor, IndexView, AttentionMeta]:
    """Return random q [T, Hi, D], weights of heads [T, Hi], a strided cache of keys, and a step's metadata.

    codes   type of the keys' codes in an 8-bit cache; None: the cache has the type of q
    Every slot that a kernel must not read holds NaN.
    """
    q, kv, meta = inputs.make(replace(case, heads=(case.heads[0], 1)), dtype)
    weights = torch.randn(q.shape[:2], generator=torch.Generator().manual_seed(4))
    if codes is None:
        return q, weights, IndexView(kv.k), meta
    blocks, _, size, dim = kv.k.shape
    arena = torch.full((blocks, 3, 1, size, dim), torch.nan).to(codes)
    cache = IndexView(arena[:, 1], torch.full((blocks, 1, size, 1), torch.nan))
    written = (~kv.k.isnan().any(-1)).flatten().nonzero()[:, 0]
    write_keys(kv.k.flatten(0, 2)[written], cache, written)
    return q, weights, cache, meta
