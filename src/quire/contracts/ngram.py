"""The rule of n-gram drafts, on the host; `quire.kernels.ngram` has the same on a device."""

import numpy as np

from quire.contracts.step import I32


def continuation(tokens: I32, count: int, shortest: int, longest: int) -> I32:
    """Return `count` drafts [count] that follow `tokens` [L]; all -1 if no n-gram of its end occurs before."""
    known = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1  # of earlier occurrences of the last `size` tokens
    size, found = 1, 0
    while len(ends):
        found = int(ends[0]) if size >= shortest else 0
        if size == longest:
            break
        ends = ends[ends > size]
        ends = ends[tokens[ends - 1 - size] == tokens[known - 1 - size]]
        size += 1
    if not found:
        return np.full(count, -1, np.int32)
    drafts: I32 = tokens[found + np.arange(count) % (known - found)]
    return drafts
