"""N-gram drafts with NumPy on the host; contract: see `quire.kernels.ngram`."""

import numpy as np
import torch

from quire.contracts.step import I32
from quire.kernels.step import StepWords, Tables


def propose(step: StepWords, tables: Tables, shortest: int, longest: int) -> None:
    """Write the drafts of a step's decodes to the token history. See `quire.kernels.ngram`."""
    starts = step.starts[: step.num_decodes + 1].tolist()
    for i, slot in enumerate(step.slots[: step.num_decodes].tolist()):
        count = starts[i + 1] - starts[i] - 1
        if count:
            known = int(tables.computed[slot]) + 1
            found = continuation(tables.history[slot, :known].cpu().numpy(), count, shortest, longest)
            tables.history[slot, known : known + count] = torch.from_numpy(found)


def continuation(tokens: I32, count: int, shortest: int, longest: int) -> I32:
    """Return `count` drafts [count] that follow `tokens` [L]; -1 for all of them if no n-gram of its end occurs before.
    """
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
