"""Layouts in memory that all implementations of latent attention ask of their arguments.

Implementations on a CPU could read other layouts. They check these all the same, so that a test without a GPU finds a
caller whose tensors the kernels of a GPU refuse.
"""

from torch import Tensor

from quire.kernels.latent import LatentView


def check_rows(q: Tensor, kv: Tensor, cache: LatentView) -> None:
    """Check what `prepare` reads and writes; raise ValueError."""
    inside = [one for one in (cache.latent, cache.rope, cache.scales) if one is not None]
    if q.stride()[1:] != (q.shape[2], 1) or kv.stride(1) != 1 or any(one.stride(3) != 1 for one in inside):
        raise ValueError(
            f"latent: q, kv and the cache must be contiguous inside a token; the strides of q, kv and of the parts of "
            f"the cache are {q.stride()}, {kv.stride()}, {[one.stride() for one in inside]}"
        )


def check_queries(q_latent: Tensor, q_rope: Tensor) -> None:
    """Check the queries of `absorbed` and `chosen`."""
    assert q_latent.is_contiguous() and q_rope.stride(2) == 1, (q_latent.stride(), q_rope.stride())


def check_expanded(q: Tensor, kv_up: Tensor, out: Tensor) -> None:
    """Check the queries, the up-projection and the output of `expanded`."""
    assert kv_up.is_contiguous() and q.stride(2) == 1 and out.stride()[1:] == (out.shape[2], 1)
