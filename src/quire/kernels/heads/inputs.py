"""Inputs for tests and measurements of the head kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.attention import KVView


@dataclass(frozen=True)
class Case:
    """A test case: T tokens, (Hq, Hkv) heads of size `dim`.

    values   of `prepare`
    normed   True: q and k are normalized; False: there is no norm
    """

    tokens: int
    heads: tuple[int, int]
    dim: int
    block_size: int
    normed: bool = True
    values: str = ""


CASES = (
    Case(1, (2, 1), 2, 8),
    Case(3, (4, 2), 16, 8, normed=False),
    Case(5, (3, 3), 20, 16),
    Case(1, (16, 8), 128, 16),
    Case(9, (7, 1), 80, 32),
    Case(33, (16, 8), 128, 16),
    Case(70, (6, 2), 256, 32, normed=False),
    Case(4, (14, 2), 64, 8),
)
VALUE_CASES = (
    Case(5, (4, 2), 16, 8, values="normed"),
    Case(7, (6, 1), 80, 16, values="normed", normed=False),
    Case(5, (3, 3), 20, 16, values="keys"),
    Case(33, (8, 2), 512, 32, values="keys"),
    Case(4, (6, 2), 64, 8, values="kept"),
)


def make(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor | None, Tensor, Tensor, KVView, Tensor]:
    """Return the arguments of `prepare`: qkv (a view of wider rows), norm, cos, signed sin, KV cache, slots.

    The cache is full of NaN, and a strided view of a larger tensor. The slots are in random order.
    """
    generator = torch.Generator().manual_seed(seed)
    (num_heads, kv_heads), dim, size = case.heads, case.dim, case.block_size
    stored = kv_heads * {"keys": 1, "kept": 0}.get(case.values, 2)
    wide = torch.randn(case.tokens, (num_heads + stored + 1) * dim, generator=generator).mul_(2).to(dtype)
    qkv = wide[:, dim:].view(case.tokens, -1, dim)
    normed = num_heads + kv_heads * (case.values != "kept")
    norm = torch.rand(normed, dim, generator=generator).add_(0.5).to(dtype) if case.normed else None
    angles = torch.rand(case.tokens, dim // 2, generator=generator) * 6.28
    cos, sin = angles.cos(), angles.sin()
    num_blocks = -(-case.tokens // size) + 3
    arena = torch.full((num_blocks, 3, 2, kv_heads, size, dim), float("nan"), dtype=dtype)
    slots = torch.randperm((num_blocks - 1) * size, generator=generator)[: case.tokens] + size
    kv = KVView(arena[:, 1, 0], arena[:, 1, 1])
    return qkv, norm, torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype), kv, slots
