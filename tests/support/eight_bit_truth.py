"""An 8-bit KV cache, and attention to it in float64."""

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView, as_list
from quire.kernels.latent import LatentView

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
K_SCALE, V_SCALE = 0.37, 1.9  # a kernel that ignores one of them is far off


def coded(kv: KVView, dtype: torch.dtype) -> KVView:
    """The numbers of a cache as codes of `dtype`, in strided views as the arena's; NaN stays NaN."""
    wide = torch.stack((kv.k.float() * 3, kv.v.float() * 3, kv.k.float()), 1).to(dtype)
    return KVView(wide[:, 0], wide[:, 1], K_SCALE, V_SCALE)


def coded_latents(cache: LatentView, dtype: torch.dtype) -> LatentView:
    """The same of latents."""
    latent, rope = (torch.stack((side.float() * 3,) * 2, 1).to(dtype)[:, 1] for side in (cache.latent, cache.rope))
    return LatentView(latent, rope, K_SCALE)


def values(side: Tensor, scale: float) -> Tensor:
    """The values of codes, by a table of all 256."""
    table = torch.arange(256, dtype=torch.uint8).view(side.dtype).double()
    return table[side.view(torch.uint8).int()] * scale


def attention(
    q: Tensor, kv: KVView, meta: AttentionMeta, scale: float, window: int | None = None, soft_cap: float | None = None
) -> Tensor:
    """Attention in float64 to the values of the cache."""
    out, starts = torch.zeros(q.shape, dtype=torch.float64), as_list(meta.query_start)
    keys, kept = values(kv.k, kv.k_scale), values(kv.v, kv.v_scale)
    for s, length in enumerate(as_list(meta.seq_lens)):
        blocks, rows = meta.block_tables[s, : -(-length // kv.block_size)].long(), starts[s + 1] - starts[s]
        k, v = (
            side[blocks].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(q.shape[1] // side.shape[1], 1)
            for side in (keys, kept)
        )
        scores = torch.einsum("mhd,nhd->hmn", q[starts[s] : starts[s + 1]].double(), k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        at, column = torch.arange(length - rows, length)[:, None], torch.arange(length)[None]
        hidden = (column > at) | (column <= at - (window or 1 << 30))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[starts[s] : starts[s + 1]] = torch.einsum("hmn,nhd->mhd", weights, v)
    return out


def absorbed(q_latent: Tensor, q_rope: Tensor, cache: LatentView, meta: AttentionMeta, scale: float) -> Tensor:
    """The absorbed form: the latent and the rotated key of a token are all heads' key, the latent is the value."""
    both = torch.cat((cache.latent.view(torch.uint8), cache.rope.view(torch.uint8)), 3).view(cache.latent.dtype)
    one = KVView(both, both, cache.scale, cache.scale)
    return attention(torch.cat((q_latent, q_rope), 2), one, meta, scale)[..., : q_latent.shape[2]]


def expanded(q: Tensor, up: Tensor, cache: LatentView, meta: AttentionMeta, scale: float, value: int) -> Tensor:
    """The form that makes keys and values of every head; the result of every row."""
    made = torch.einsum("hpl,bjsl->bhsp", up.double(), values(cache.latent, cache.scale))
    rope = values(cache.rope, cache.scale).expand(-1, len(up), -1, -1)
    keys, kept = torch.cat((made[..., :-value], rope), 3), made[..., -value:]
    out = torch.zeros(*q.shape[:2], value, dtype=torch.float64)
    starts = as_list(meta.query_start)
    for s, length in enumerate(as_list(meta.seq_lens)):
        blocks, rows = meta.block_tables[s, : -(-length // cache.block_size)].long(), slice(starts[s], starts[s + 1])
        k, v = (side[blocks].transpose(1, 2).flatten(0, 1)[:length] for side in (keys, kept))
        scores = torch.einsum("mhd,nhd->hmn", q[rows].double(), k) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(length - scores.shape[1] + 1)
        out[rows] = torch.einsum("hmn,nhd->mhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
    return out


def near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare with float64 relative to the largest value."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def written(actual: Tensor, expected: Tensor) -> None:
    """Compare codes that were written in Triton's interpreter, which loses a carry into the exponent.

    So codes may differ where a number is rounded up to a power of two; and it cuts off numbers below the normal ones.
    """
    same = actual.view(torch.uint8) == expected.view(torch.uint8)
    part = expected.float().frexp().mantissa.abs()
    assert (same | (part == 0.5) | (expected.float().abs() < 2**-6)).all() and same.float().mean() > 0.9
