"""Integers of 4 or 8 bits in int32 words, and in bytes with the low nibble first.

n: rows, K: columns, p = 32 / bits: values in a word.
"""

import torch
from torch import Tensor

WORD = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of word c holds number 8c + AWQ_ORDER[i]
NATURAL = tuple(range(8))
NUMBERS = 1 << 20  # that are converted at once: temporary tensors stay small


def fill_rows(out: Tensor, words: Tensor) -> None:
    """Write words [n, W], packed along the rows in natural order, to bytes [n, B]; B <= 4 W, the rest is padding."""
    if out.shape[1] == 4 * words.shape[1]:
        out.view(torch.int32).copy_(words)
    else:
        out.copy_(words.contiguous().view(torch.uint8)[:, : out.shape[1]])


def spread(words: Tensor, bits: int, order: tuple[int, ...] = NATURAL) -> Tensor:
    """Unpack words [.., C] along their last axis: [.., C * p] uint8."""
    out = torch.empty(*words.shape, WORD // bits, dtype=torch.uint8, device=words.device)
    for i in range(WORD // bits):
        out[..., order[i]] = words >> bits * i & (1 << bits) - 1
    return out.flatten(-2)


def join_nibbles(values: Tensor) -> Tensor:
    """Pack 4-bit values [n, K] uint8 into bytes [n, K / 2]; the low nibble is the even column."""
    return values[:, 0::2] | values[:, 1::2] << 4


def fill_awq(out: Tensor, words: Tensor) -> None:
    """Write the values of AWQ, [K, n / 8] words packed along the rows of the matrix, to bytes [n, K / 2]."""
    inner, packed = words.shape
    step = max(NUMBERS // max(packed, 1), 1) * 2
    for first in range(0, inner, step):
        some = words[first : first + step]
        for i, row in enumerate(AWQ_ORDER):
            nibble = (some >> 4 * i & 15).to(torch.uint8)
            out[row::8, first // 2 : (first + step) // 2] = (nibble[0::2] | nibble[1::2] << 4).t()


def permute(values: Tensor, order: Tensor, bits: int) -> None:
    """Put the columns of values [n, K * bits / 8] in order, in place: column k becomes the former column order[k]."""
    step = max(NUMBERS // max(values.shape[1], 1), 1)
    for part in values.split(step):
        if bits == 4:
            both = torch.stack((part & 15, part >> 4), -1).flatten(1)
            part.copy_(join_nibbles(both[:, order]))
        else:
            part.copy_(part[:, order])
