"""Blocks for the tokens of the next step, and preemption when the pool is short of blocks."""

import logging

import numpy as np

from quire.contracts.step import I32
from quire.engine.roster import Roster

LOG = logging.getLogger("quire")


class Growth:
    """Gives running slots the blocks they need; preempts requests when blocks are short, to be recomputed later.

    redrafted       tokens before the last confirmed one for which a drafter with layers writes KV in the next step
    num_preempted   preemptions since the start
    """

    def __init__(self, roster: Roster, redrafted: int = 0) -> None:
        self._redrafted = redrafted
        self._roster, self._table, self._allocator = roster, roster.table, roster.allocator
        self.num_preempted = 0

    def grow(self, slots: I32, num_tokens: I32) -> tuple[I32, I32, I32]:
        """Give every slot the blocks for its tokens. When the pool is short, leave drafts out; then preempt requests,
        the last in order first.

        Returns `slots` and `num_tokens` of the requests that still run, and the rows of `StepPlan.appended`.
        """
        needed = self._table.planned[slots] + num_tokens
        try:
            if self._allocator.has_windows:  # later rows begin at the last confirmed token, or at a chunk
                last = self._table.confirmed[slots] - 1 - self._redrafted
                self._allocator.trim(slots, np.minimum(self._table.planned[slots], np.maximum(last, 0)))
            rows = self._allocator.grow_many(slots, needed)
            if rows is None and (num_tokens > 1).any():  # no request is preempted for drafts of this step
                decodes = self._table.planned[slots] >= self._table.goal[slots]
                num_tokens = np.where(decodes, 1, num_tokens).astype(np.int32)
                needed = self._table.planned[slots] + num_tokens
                rows = self._allocator.grow_many(slots, needed)
        except Exception:  # growing one by one, below, finds the request that fails
            LOG.exception("the slots could not grow together")
            rows = None
        if rows is not None:
            return slots, num_tokens, rows
        short = np.flatnonzero(needed > self._allocator.capacity[slots])
        appended: list[tuple[int, int, int]] = []
        for i in short.tolist():
            slot = int(slots[i])
            while (request := self._table.requests[slot]) is not None:
                try:
                    blocks = self._allocator.grow(slot, int(needed[i]))
                except Exception:
                    self._roster.fail(request)
                    break
                if blocks is not None:
                    appended += blocks
                    break
                self.preempt_last()
        return self.still_running(slots, num_tokens, np.array(appended, np.int32).reshape(-1, 3))

    def still_running(self, slots: I32, num_tokens: I32, appended: I32) -> tuple[I32, I32, I32]:
        """Return the three arrays without the entries of slots whose requests were just preempted or have failed."""
        running = np.array([request is not None for request in self._table.requests], bool)
        kept = running[slots]
        return slots[kept], num_tokens[kept], appended[running[appended[:, 0]]]

    def preempt_last(self) -> None:
        """Preempt the running request that comes last in order."""
        request = self._table.requests[int(self._table.order()[-1])]
        assert request is not None
        self._roster.preempt(request)
        self.num_preempted += 1
