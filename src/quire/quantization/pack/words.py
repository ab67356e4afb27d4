"""Integers of 4 or 8 bits in int32 words, and in bytes with the low nibble first.

n: rows, K: columns, p = 32 / bits: values in a word.
"""

import torch
from torch import Tensor

WORD = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of word c holds number 8c + AWQ_ORDER[i]
NATURAL = tuple(range(8))


def to_bytes(words: Tensor, columns: int, bits: int) -> Tensor:
    """Return words [n, K / p], packed along the rows in natural order, as bytes [n, K * bits / 8]; may be a view."""
    return words.contiguous().view(torch.uint8)[:, : columns * bits // 8].contiguous()


def spread(words: Tensor, bits: int, order: tuple[int, ...] = NATURAL) -> Tensor:
    """Unpack words [.., C] along their last axis: [.., C * p] uint8."""
    out = torch.empty(*words.shape, WORD // bits, dtype=torch.uint8, device=words.device)
    for i in range(WORD // bits):
        out[..., order[i]] = words >> bits * i & (1 << bits) - 1
    return out.flatten(-2)


def join_nibbles(values: Tensor) -> Tensor:
    """Pack 4-bit values [n, K] uint8 into bytes [n, K / 2]; the low nibble is the even column."""
    return values[:, 0::2] | values[:, 1::2] << 4


def awq_bytes(words: Tensor) -> Tensor:
    """Return the values of AWQ, [K, n / 8] words packed along the rows of the matrix, as bytes [n, K / 2]."""
    inner, packed = words.shape
    out = torch.empty(packed * 8, inner // 2, dtype=torch.uint8, device=words.device)
    for i, row in enumerate(AWQ_ORDER):
        nibble = (words >> 4 * i & 15).to(torch.uint8)
        out[row::8] = (nibble[0::2] | nibble[1::2] << 4).t()
    return out


def permuted(values: Tensor, order: Tensor, bits: int, rows: int = 1024) -> Tensor:
    """Return values [n, K * bits / 8] with columns in `order`: column k of the result is column order[k]."""
    out = torch.empty_like(values)
    for i in range(0, len(values), rows):
        part = values[i : i + rows]
        if bits == 4:
            both = torch.stack((part & 15, part >> 4), -1).flatten(1)
            out[i : i + rows] = join_nibbles(both[:, order])
        else:
            out[i : i + rows] = part[:, order]
    return out
