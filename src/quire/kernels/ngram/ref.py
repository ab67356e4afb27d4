"""N-gram drafts with NumPy on the host; contract: see `quire.kernels.ngram`."""

import torch

from quire.contracts.ngram import continuation
from quire.kernels.step import StepWords, Tables


def propose(step: StepWords, tables: Tables, shortest: int, longest: int) -> None:
    """Write the drafts of a step's decodes to the token history. See `quire.kernels.ngram`."""
    starts = step.starts[: step.num_decodes + 1].tolist()
    for i, slot in enumerate(step.slots[: step.num_decodes].tolist()):
        count = starts[i + 1] - starts[i] - 1
        if count and not tables.hosted[slot]:
            known = int(tables.computed[slot]) + 1
            found = continuation(tables.history[slot, :known].cpu().numpy(), count, shortest, longest)
            tables.history[slot, known : known + count] = torch.from_numpy(found)
