"""How one step's tokens are shared out."""

import numpy as np

from quire.contracts.step import I32
from quire.engine.table import RunningTable


def share_budget(table: RunningTable, budget: int, decode_lag: int) -> tuple[I32, I32]:
    """Choose the running slots of the next step and how many tokens each advances.

    Every decoding slot gets its one token first, so that a long prompt never delays running answers; what is left of
    the budget goes to the slots that are catching up, in order. Returns (slots [S], num_tokens [S]), both int32.
    """
    order = table.order()
    planned = table.planned[order]
    total = table.known[order] + table.in_flight[order]
    catching_up = planned < table.goal[order]
    decoding = ~catching_up & (total > planned) & (total < table.end[order]) & (table.in_flight[order] < decode_lag)
    decodes = order[decoding]
    if not catching_up.any():
        return decodes, np.ones(len(decodes), np.int32)
    pending = total[catching_up] - planned[catching_up]
    room = budget - len(decodes)
    chunks = pending - np.clip(np.cumsum(pending) - room, 0, pending)
    prompts = order[catching_up][chunks > 0]
    slots = np.concatenate([decodes, prompts])
    return slots, np.concatenate([np.ones(len(decodes), np.int32), chunks[chunks > 0]]).astype(np.int32)
