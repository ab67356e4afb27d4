"""Norm, rotation and cache write in one pass over the projection; native.c has the C code."""

import torch
from torch import Tensor

from quire.kernels.attention import KVView
from quire.kernels.heads import VALUES, num_heads
from quire.kernels.native.library import loaded


def prepare(
    qkv: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: KVView,
    kv_slots: Tensor,
    values: str = "",
) -> Tensor:
    """Normalize and rotate q and k, write k and v to the cache, and return q. See `quire.kernels.heads`."""
    rows, _, dim = qkv.shape
    k, v = kv.k, kv.v
    block_size = k.shape[2]
    own_heads, kv_heads = num_heads(qkv, k.shape[1], values)
    _check(qkv, norm, cos, sin, kv, kv_slots, own_heads + kv_heads)
    q = qkv.new_empty(rows, own_heads, dim)
    loaded().quire_heads(
        qkv.data_ptr(),
        None if norm is None else norm.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        kv_slots.data_ptr(),
        rows,
        own_heads,
        kv_heads,
        dim,
        qkv.stride(0),
        block_size,
        k.stride(0),
        k.stride(1),
        eps,
        qkv.dtype == torch.bfloat16,
        norm is None or norm.dtype == torch.bfloat16,
        VALUES.index(values),
        torch.get_num_threads(),
    )
    return q


def _check(
    qkv: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor, kv: KVView, kv_slots: Tensor, normed: int
) -> None:
    """Check types, devices, shapes and strides, which the C code does not check; raise ValueError.

    normed   heads of q and k
    """
    (rows, _, dim), dtype, k, v = qkv.shape, qkv.dtype, kv.k, kv.v
    if dtype not in (torch.float32, torch.bfloat16) or not cos.dtype == sin.dtype == k.dtype == v.dtype == dtype:
        raise ValueError(
            f"native heads: qkv, cos, sin and the cache must all be float32 or all bfloat16; they are "
            f"{dtype}, {cos.dtype}, {sin.dtype}, {k.dtype}"
        )
    if not (qkv.is_cpu and cos.is_cpu and sin.is_cpu and k.is_cpu and v.is_cpu and kv_slots.is_cpu):
        raise ValueError(
            f"native heads: all tensors must be on the CPU; qkv is on {qkv.device}, cos on {cos.device}, "
            f"kv_slots on {kv_slots.device}, the cache on {k.device}"
        )
    stride = k.stride()
    if qkv.stride()[1:] != (dim, 1) or stride[2:] != (dim, 1) or v.stride() != stride or dim % 2:
        raise ValueError(
            f"native heads: the head size must be even, qkv contiguous inside a token, the cache inside a "
            f"head of a block, and K and V must have the same strides; the head size is {dim}, the "
            f"strides of qkv, K and V are {qkv.stride()}, {stride}, {v.stride()}"
        )
    shape = k.shape
    if v.shape != shape or shape[3] != dim or cos.shape != (rows, dim) or sin.shape != (rows, dim):
        raise ValueError(
            f"native heads: K and V must have the head size {dim} of qkv, and cos and sin the shape "
            f"{(rows, dim)}; "
            f"the shapes of qkv, K, V, cos and sin are {tuple(qkv.shape)}, {tuple(shape)}, "
            f"{tuple(v.shape)}, {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    fits = norm is None or (norm.shape == (normed, dim) and norm.dtype in (dtype, torch.float32))
    if norm is not None and not (fits and norm.is_contiguous()):
        raise ValueError(
            f"native heads: the weight of the norm must be contiguous {dtype} or float32 {(normed, dim)}, "
            f"a row for each head of q and k; it is {norm.dtype} {tuple(norm.shape)} with strides "
            f"{norm.stride()}"
        )
    if kv_slots.dtype != torch.int64 or kv_slots.shape != (rows,):
        raise ValueError(
            f"native heads: kv_slots must be int64 [{rows}], one for each token; they are "
            f"{kv_slots.dtype} {tuple(kv_slots.shape)}"
        )
    if not (cos.is_contiguous() and sin.is_contiguous() and kv_slots.is_contiguous()):
        raise ValueError(
            f"native heads: cos, sin and kv_slots must be contiguous; their strides are {cos.stride()}, "
            f"{sin.stride()}, {kv_slots.stride()}"
        )
