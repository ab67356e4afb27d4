"""Integers of 4 or 8 bits in int32 words, and in bytes with the low nibble first.

n: rows, K: columns, p = 32 / bits: values in a word. In natural order number j of a word lies in bits j * bits and on.
In AWQ's, number j of 8 lies in nibble j % 2 * 4 + j // 2.
"""

import torch
from torch import Tensor

WORD = 32
NUMBERS = 1 << 20  # that are converted at once: temporary tensors stay small


def fill_rows(out: Tensor, words: Tensor) -> None:
    """Copy packed values from int32 words [n, W] to bytes `out` [n, B], in the same order, without the padding."""
    if out.shape[1] == 4 * words.shape[1]:
        out.view(torch.int32).copy_(words)
    else:
        out.copy_(words.contiguous().view(torch.uint8)[:, : out.shape[1]])


def spread(words: Tensor, bits: int, awq: bool = False) -> Tensor:
    """Unpack int32 words [a, C] to values [a, C * 32 / bits] uint8. `awq`: the words have AWQ's order of nibbles."""
    places = torch.arange(WORD // bits, dtype=torch.int32, device=words.device)
    if awq:
        places = places % 2 * 4 + places // 2
    return (words[..., None] >> places * bits & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def join_nibbles(values: Tensor) -> Tensor:
    """Pack 4-bit values [n, K] uint8 into bytes [n, K / 2]; the low nibble is the even column."""
    return values[:, 0::2] | values[:, 1::2] << 4


def fill_awq(out: Tensor, words: Tensor) -> None:
    """Convert AWQ's transposed int32 words [K, n / 8] to rows `out` [n, K / 2] uint8, two 4-bit values per byte."""
    inner, packed = words.shape
    step = max(NUMBERS // max(8 * packed, 1), 1) * 2
    for first in range(0, inner, step):
        both = spread(words[first : first + step], 4, awq=True)
        out[:, first // 2 : (first + step) // 2] = (both[0::2] | both[1::2] << 4).t()


def permute(values: Tensor, order: Tensor, bits: int) -> None:
    """Permute columns of packed values [n, K * bits / 8] in place: column k becomes the former column order[k]."""
    step = max(NUMBERS // max(values.shape[1], 1), 1)
    for part in values.split(step):
        if bits == 4:
            both = torch.stack((part & 15, part >> 4), -1).flatten(1)
            part.copy_(join_nibbles(both[:, order]))
        else:
            part.copy_(part[:, order])
