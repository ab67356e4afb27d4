"""Choice of the rows that are computed in all layers, on any device, without a value that the host must know."""

from collections.abc import Sequence

import torch
from torch import Tensor

Span = tuple[int, int, int]  # first moved token of a sequence, end of its moved tokens, number of them to keep


def choose_rows(deviations: Tensor, moved: Tensor, spans: Sequence[Span], others: Tensor) -> Tensor:
    """Return the rows to keep [K] int64, in ascending order: `others`, and of each span those that deviate most.

    deviations   [N] float32 of the moved tokens; an infinite one, or NaN, comes first. Of equal ones the first is kept
    moved        [N] int64, row of each moved token; ascending
    others       [F] int64, rows that are always kept
    K = F + the sum of the spans' numbers
    """
    kept = [others]
    for first, last, count in spans:
        order = deviations[first:last].argsort(descending=True, stable=True)
        kept.append(moved[first:last][order[:count]])
    return torch.cat(kept).sort().values
