"""Random steps of latent attention over a poisoned cache, for the tests of its kernels and layers."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, inputs
from quire.kernels.attention.inputs import Case
from quire.kernels.latent import LatentView, sequences


def steps(*cases: Case, latent: int = 24, rope: int = 8) -> tuple[Case, ...]:
    """The steps of attention with one head of latents and rotated keys."""
    return tuple(replace(case, heads=(case.heads[0], 1), head_dim=latent + rope) for case in cases)


def make(case: Case, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, LatentView, AttentionMeta]:
    """q_latent [T, H, L] and q_rope [T, H, R], strided, and a cache in wider pages: NaN where nothing may be read.

    The host knows every sequence.
    """
    q, kv, meta = inputs.make(case, dtype)
    sides = [torch.full((len(kv.k), 3, *kv.k.shape[1:3], n), float("nan"), dtype=dtype)
             for n in (case.head_dim - rope, rope)]  # fmt: skip
    sides[0][:, 1], sides[1][:, 1] = kv.k.split([case.head_dim - rope, rope], dim=3)
    wide = torch.cat((q, q), 2)[..., -rope:]
    cache = LatentView(sides[0][:, 1], sides[1][:, 1])
    return q[..., :-rope].contiguous(), wide, cache, replace(meta, prompts=sequences(meta))


def weights(heads: int, plain: int, value: int, latent: int, dtype: torch.dtype) -> Tensor:
    """kv_up [H, P + V, L]."""
    random = torch.Generator().manual_seed(3)
    return torch.randn(heads, plain + value, latent, generator=random).div_(latent**0.5).to(dtype)
