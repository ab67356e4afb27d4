"""Steps of decodes for kernels that take latents before their norm."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta
from quire.kernels.attention.inputs import Case
from quire.kernels.joined.inputs import HeadInputs, LatentInputs
from quire.kernels.latent import LatentView
from quire.kernels.latent.inputs import make, steps

PLAIN, ROPE = 32, 64  # unrotated and rotated dimensions of queries
SCALE = 0.07


@dataclass(frozen=True)
class LatentStep:
    """The arguments of `latent_clusters.attention`."""

    absorbed: Tensor
    inputs: LatentInputs
    given: HeadInputs
    kv: LatentView
    meta: AttentionMeta

    def tensors(self) -> list[Tensor]:
        """All tensors that kernels of the step write before this one: those that it may not read before its wait."""
        tables = [one for one in vars(self.meta).values() if isinstance(one, Tensor)]
        return [self.absorbed, self.inputs.q, self.inputs.given, self.given.cos, self.given.sin, *tables]


def latent_step(lengths: tuple[int, ...], rows: tuple[int, ...], heads: int, latent: int, size: int) -> LatentStep:
    """Return a step of decodes: queries, latents, norm and angles, a cache without the newest tokens, and a padded
    sequence.

    lengths, rows   of the sequences, the step's tokens included
    size            tokens of a block of the cache
    """
    dtype, (case,) = torch.bfloat16, steps(Case(rows, lengths, (heads, 1), block_size=size), latent=latent, rope=ROPE)
    absorbed, _, kv, meta = make(case, ROPE, dtype)
    tokens = sum(rows)
    torch.manual_seed(tokens + latent)
    projected = torch.randn(tokens, heads * (PLAIN + ROPE) + latent + ROPE + 8).mul_(2).to(dtype)[:, 8:]
    angles = torch.rand(tokens, ROPE // 2) * 6.28
    cos, sin = angles.cos(), angles.sin()
    norm = (torch.rand(latent) + 0.5).to(dtype)
    given = HeadInputs(norm, 1e-6, torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
    for slot in meta.kv_slots.tolist():
        for part in (kv.latent, kv.rope):
            part[slot // size, :, slot % size] = float("nan")
    assert isinstance(meta.query_start, Tensor) and isinstance(meta.seq_lens, Tensor)
    meta = replace(
        meta,
        query_start=torch.cat((meta.query_start, meta.query_start[-1:])),
        seq_lens=torch.cat((meta.seq_lens, torch.zeros(1, dtype=torch.int32))),
        block_tables=torch.cat((meta.block_tables, meta.block_tables[:1])),
        max_query_len=max(rows),
        decode_len=max(rows),
        prompts=(),
        plans={},
    )
    q = projected[:, : -latent - ROPE].unflatten(1, (heads, -1))
    return LatentStep(absorbed, LatentInputs(q, projected[:, -latent - ROPE :]), given, kv, meta)
