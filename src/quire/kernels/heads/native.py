"""One pass over the projection; the C side is native.c."""

import torch
from torch import Tensor

from quire.kernels.attention import KVView
from quire.kernels.native.library import loaded, missing
from quire.kernels.select import Support

SUPPORT = Support(devices=frozenset({"cpu"}), dtypes=frozenset({"float32", "bfloat16"}), missing=missing())


def prepare(
    qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, kv: KVView, kv_slots: Tensor
) -> Tensor:
    """See `quire.kernels.heads`."""
    rows, heads, dim = qkv.shape
    k, v = kv.k, kv.v
    num_kv_heads, block_size = k.shape[1], k.shape[2]
    num_heads = heads - 2 * num_kv_heads
    assert qkv.stride()[1:] == (dim, 1) and k.stride() == v.stride() and k.stride()[2:] == (dim, 1)
    assert cos.dtype == sin.dtype == qkv.dtype == k.dtype and cos.is_contiguous() and sin.is_contiguous()
    assert kv_slots.dtype == torch.int64 and kv_slots.is_contiguous()
    q = qkv.new_empty(rows, num_heads, dim)
    loaded().quire_heads(
        qkv.data_ptr(), None if norm is None else norm.data_ptr(), cos.data_ptr(), sin.data_ptr(), q.data_ptr(),
        k.data_ptr(), v.data_ptr(), kv_slots.data_ptr(), rows, num_heads, num_kv_heads, dim, qkv.stride(0),
        block_size, k.stride(0), k.stride(1), eps, qkv.dtype == torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return q
