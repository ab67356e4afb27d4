"""Rows sorted by (value descending, id ascending), whole or only their beginning.

Knows nothing of what the values mean. NaN is not expected: callers sort such rows out.
"""

import numpy as np
import torch
from torch import Tensor

_SIGN = 0x7FFFFFFF


def sorted_by_id(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [R, V] float32 -> (values, ids int64), both [R, V], by (value descending, id ascending).

    On a CPU the value's bits, made monotonic, and the id are packed into one int64, because numpy's vectorized sort of
    those takes a tenth of the time of a stable sort that carries indices.
    """
    if values.device.type != "cpu":
        ordered = torch.sort(values, dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    keys = torch.from_numpy(np.sort(_packed(values).numpy(), axis=-1))
    ids = keys & 0xFFFFFFFF
    return values.gather(1, ids), ids


def _packed(values: Tensor) -> Tensor:
    """[R, V] int64 that sort ascending as (value descending, id ascending); adding 0 makes -0.0 equal 0.0."""
    bits = values.neg().add_(0.0).view(torch.int32)
    bits.bitwise_xor_((bits >> 31).bitwise_and_(_SIGN))
    ids = torch.arange(values.shape[1], device=values.device)
    return bits.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids)


def largest(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest of each row and their ids, by (value descending, id ascending).

    Which of several equals to the last value are among them is left open: callers that need to know use `top_by_id`.
    """
    if width >= values.shape[1]:
        return sorted_by_id(values)
    ids = torch.topk(values, width, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered = torch.sort(values.gather(1, ids), dim=-1, descending=True, stable=True)
    return ordered.values, ids.gather(1, ordered.indices)


def top_by_id(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of [R, V] as (values, ids) [R, k], by (value descending, id ascending).

    Equals at the k-th place come in by ascending id; only rows where they straddle it are sorted whole.
    """
    if k == 0:
        return values[:, :0], values.new_empty((values.shape[0], 0), dtype=torch.int64)
    top, ids = largest(values, k)
    straddled = ((values >= top[:, -1:]).sum(dim=-1) > k).nonzero().squeeze(1)
    if straddled.numel():
        whole, whole_ids = sorted_by_id(values[straddled])
        top[straddled], ids[straddled] = whole[:, :k], whole_ids[:, :k]
    return top, ids


def top_packed(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_by_id` in operations whose sizes do not depend on the values, for devices that must not be waited for."""
    ids = torch.topk(_packed(values), k, dim=-1, largest=False, sorted=True).values & 0xFFFFFFFF
    return values.gather(1, ids), ids
