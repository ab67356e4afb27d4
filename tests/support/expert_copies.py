"""The choice among copies of experts in numpy, with which that of `kernels/expert_copies/slots.py` is compared."""

from typing import Any

import numpy as np

from quire.config.balancing import GOLDEN, SPREAD
from quire.contracts.step import I32
from quire.engine.eplb import ExpertMap

Numbers = np.ndarray[Any, np.dtype[Any]]


def choose(experts: ExpertMap, layer: int, ids: I32, first_row: int = 0) -> I32:
    """Return the slot that computes each routed expert: [T, k], from the expert ids [T, k] of consecutive rows.

    first_row   number of the first row, counted over the rows of all replicas in the step
    """
    rows = first_row + np.arange(len(ids))[:, None]
    slots: I32 = experts.slots[layer][ids, choose_copy(rows, ids, experts.counts[layer][ids])]
    return slots


def choose_copy(rows: Numbers, experts: Numbers, counts: Numbers) -> I32:
    """Return which of an expert's `counts` copies computes a row: a number in [0, counts), elementwise.

    rows   number of the row, counted over the rows of all replicas in the step
    In unsigned 32-bit integers: umulhi(row * GOLDEN + expert * SPREAD, count).
    """
    place = (rows.astype(np.uint64) * GOLDEN + experts.astype(np.uint64) * SPREAD) & 0xFFFFFFFF
    return (place * counts.astype(np.uint64) >> 32).astype(np.int32)
