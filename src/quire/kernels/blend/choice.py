"""Choice of the rows that are computed in all layers, on any device, without a value that the host must know."""

from collections.abc import Sequence

import torch
from torch import Tensor

Span = tuple[int, int, int]  # first moved token of a sequence, end of its moved tokens, number of them to keep


def choose_rows(deviations: Tensor, first: Tensor, moved: Tensor, spans: Sequence[Span], others: Tensor) -> Tensor:
    """Return the rows to keep [K] int64, in ascending order: `others`, and of each span those that deviate most.

    deviations   [N] float32 of the moved tokens; NaN is more than any number. Of equal ones the earlier is kept
    first        [N] bool, moved tokens that are kept before all others of their span
    moved        [N] int64, row of each moved token; ascending
    others       [F] int64, rows that are always kept
    K = F + the sum of the spans' numbers
    """
    kept = [others]
    for start, end, count in spans:
        order = deviations[start:end].argsort(descending=True, stable=True)
        order = order[first[start:end][order].argsort(descending=True, stable=True)]
        kept.append(moved[start:end][order[:count]])
    return torch.cat(kept).sort().values
