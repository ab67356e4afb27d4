"""`SortedIds`: chosen experts with their pairs (token, chosen expert) sorted already, as kernels of many tokens do."""

from typing import NamedTuple

from torch import Tensor


class SortedIds(NamedTuple):
    """Experts of each token, and the pairs sorted by expert; pair p belongs to token p // k.

    ids      [T, k] int32, places of experts; -1: no expert
    order    [T k] int32: numbers of the pairs, sorted by expert, stably, without pairs of no expert
    starts   [experts + 1] int32: first entry of each expert in `order`, and the end of the last
    """

    ids: Tensor
    order: Tensor
    starts: Tensor
