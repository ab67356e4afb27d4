"""Division of a step's token budget among the running requests."""

import numpy as np

from quire.contracts.step import I32, MAX_VERIFY_ROWS
from quire.engine.drafts import DraftLength
from quire.engine.table import RunningTable


def share_budget(
    table: RunningTable, budget: int, decode_lag: int, drafts: DraftLength, num_stages: int = 1
) -> tuple[I32, I32]:
    """Choose the running slots of the next step, and the most tokens that each slot computes.

    budget       maximum number of tokens of the step
    decode_lag   maximum number of steps in flight for a decoding slot, see `ExecutorFacts`
    drafts       chooses the maximum number of drafts per decode
    Decoding slots come first, so that a long prompt never delays them; each takes one token of the budget. The rest of
    the budget goes to slots that compute prompts or recompute tokens, in order. Drafts count against `MAX_VERIFY_ROWS`.
    A slot whose drafts come from the host waits while others of them are in flight.
    In a pipeline of `num_stages` the decoding slots are spread evenly over as many steps, which run at the same time.
    Returns (slots [S], num_tokens [S]), both int32, decodes first.
    """
    order = table.order()
    planned, bound = table.planned[order], table.upper_bound[order]
    catching_up = planned < table.goal[order]
    unfinished = ~catching_up & (bound < table.end[order])
    if drafts.most:  # drafts of the host come behind tokens whose number is known
        unfinished &= ~table.masked[order] | (bound == table.confirmed[order] + table.in_flight[order])
    decodes = order[unfinished & (table.in_flight[order] < decode_lag)]
    if num_stages > 1:
        decodes = decodes[: -(-int(np.count_nonzero(unfinished)) // num_stages)]
    rows = _rows(table, decodes, drafts.choose(len(decodes))) if drafts.most else np.ones(len(decodes), np.int32)
    if num_stages > 1 and drafts.most:  # drafts are there, or there are none
        rows = np.where(table.masked[decodes], rows, np.minimum(rows, 1 + table.num_ahead[decodes])).astype(np.int32)
    if not catching_up.any():
        return decodes, rows
    pending = bound[catching_up] - planned[catching_up]
    room = budget - len(decodes)
    chunks = pending - np.clip(np.cumsum(pending) - room, 0, pending)
    prompts = order[catching_up][chunks > 0]
    return np.concatenate([decodes, prompts]), np.concatenate([rows, chunks[chunks > 0]]).astype(np.int32)


def _rows(table: RunningTable, decodes: I32, num_drafts: int) -> I32:
    """Return the number of rows of each decode: its last token and its drafts.

    Drafts never go past the end of a request, and are planned only as far as all rows together fit `MAX_VERIFY_ROWS`.
    """
    most = min(1 + num_drafts, max(1, MAX_VERIFY_ROWS // max(1, len(decodes))))
    rows: I32 = np.minimum(table.end[decodes] - table.upper_bound[decodes], most)
    return np.minimum(rows, 1 + table.most_drafts[decodes])
