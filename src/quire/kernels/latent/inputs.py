"""Random steps over a latent cache, for tests and measurements of the latent attention kernels.

L latent, R rotated part, P unrotated part, V value; see `quire.kernels.latent`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, inputs
from quire.kernels.attention.inputs import Case
from quire.kernels.latent import LatentView, sequences


def steps(*cases: Case, latent: int = 24, rope: int = 8) -> tuple[Case, ...]:
    """Return the attention test `cases`, changed for an MLA cache: one KV head of latent + rope elements."""
    return tuple(replace(case, heads=(case.heads[0], 1), head_dim=latent + rope) for case in cases)


def make(case: Case, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, LatentView, AttentionMeta]:
    """Return random q_latent [T, H, L], q_rope [T, H, R] (strided), a strided MLA cache, and a step's metadata.

    Every slot that a kernel must not read holds NaN. `meta.prompts` has every sequence that has rows.
    """
    q, kv, meta = inputs.make(case, dtype)
    widths = [case.head_dim - rope, rope]
    latent, rotated = (torch.full((len(kv.k), 3, *kv.k.shape[1:3], n), float("nan"), dtype=dtype) for n in widths)
    latent[:, 1], rotated[:, 1] = kv.k.split(widths, dim=3)
    q_rope = torch.cat((q, q), 2)[..., -rope:]
    cache = LatentView(latent[:, 1], rotated[:, 1])
    return q[..., :-rope].contiguous(), q_rope, cache, replace(meta, prompts=sequences(meta))


def weights(heads: int, plain: int, value: int, latent: int, dtype: torch.dtype) -> Tensor:
    """Return a random up-projection kv_up [H, P + V, L]; plain, value, latent: the widths P, V and L."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(heads, plain + value, latent, generator=generator).div_(latent**0.5).to(dtype)
