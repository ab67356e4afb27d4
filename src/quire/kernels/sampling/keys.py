"""Packed keys: a value and its id as an int64, so that the largest key of a row names the token, whoever computed it.

The upper half is the value as an int32 in the order of float32. The lower half falls with the id: of equal values the
lowest id has the largest key. `BROKEN` marks a row with NaN or +inf. `triton_rows.py` has the same in Triton.
"""

import torch
from torch import Tensor

BROKEN = 0x7FFFFFFFFFFFFFFF
_EMPTY = -2139095041  # upper half of -inf
_IDS = 0x7FFFFFFF


def pack_keys(values: Tensor, ids: Tensor, peaks: Tensor) -> Tensor:
    """Pack values [R] float32 and their ids [R] into int64 keys [R]: a larger value gives a larger key.

    peaks   [R]: largest raw logit of each row; if it is NaN or +inf, the key is `BROKEN`
    """
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ _IDS, bits).long()
    keys = (ordered << 32) | (_IDS - ids)
    return keys.masked_fill_(peaks.isnan() | (peaks == torch.inf), BROKEN)


def unpack_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens [R] int64 and codes [R] uint8, from the largest key of each row.

    codes   0: valid; 1: the raw logits have NaN or +inf; 2: no id may be sampled. With 1 and 2 the token is 0
    """
    codes = torch.zeros_like(keys, dtype=torch.uint8)
    codes.masked_fill_((keys >> 32) == _EMPTY, 2).masked_fill_(keys == BROKEN, 1)
    return (_IDS - (keys & _IDS)).masked_fill_(codes != 0, 0), codes
