"""Drafts of a pipeline: the tokens and drafts that a plan tells its stages, and KV blocks for the drafts to come."""

import logging

import numpy as np

from quire.contracts.step import I32, StageRuns
from quire.engine.drafts import DraftLength
from quire.engine.roster import Roster

LOG = logging.getLogger("quire")


class StageRunWriter:
    """Writes `StageRuns`. A slot of a pipeline is in one step in flight at most, so all of its tokens are known."""

    def __init__(self, roster: Roster, drafts: DraftLength) -> None:
        self._table, self._allocator, self._drafts = roster.table, roster.allocator, drafts

    def write(self, decodes: I32, rows: I32, sampling: I32, after: I32, appended: I32) -> tuple[StageRuns, I32]:
        """Return the runs of a step, and the blocks that it appends: `appended`, and those for the drafts to come.

        decodes, rows     [D] slots that decode, and the rows of each
        sampling, after   [N] slots that sample, and the most tokens of each whose KV exists after the step
        """
        table, tokens, counts = self._table, list[int](), list[int]()
        for slot, count in zip(decodes.tolist(), rows.tolist(), strict=True):
            request = table.requests[slot]
            assert request is not None, "a decode has a request"
            told = list(request.tokens[int(table.told[slot]) :])
            if not table.masked[slot]:
                told += table.ahead[slot, : count - 1].tolist()
            tokens += told
            counts.append(len(told))
        lengths, begins = table.confirmed[decodes], table.told[decodes]
        table.told[decodes], table.num_ahead[decodes] = lengths, 0  # the result of this step brings other drafts
        most = self._drafts.limit(len(sampling))
        limits, more = self._room(sampling, after, most)
        runs = StageRuns(
            slots=decodes,
            lengths=lengths,
            begins=begins,
            counts=np.array(counts, np.int32),
            tokens=np.array(tokens, np.int32),
            limits=limits,
            most=most,
        )
        return runs, np.concatenate([appended, more])

    def _room(self, sampling: I32, after: I32, most: int) -> tuple[I32, I32]:
        """Return `StageRuns.limits`, and new blocks for drafts. No request is preempted for these."""
        none, end = np.empty((0, 3), np.int32), self._table.end[sampling]
        if not most:
            return np.zeros(len(sampling), np.int32), none
        if not self._drafts.cached:
            return end, none
        try:
            appended = self._allocator.grow_many(sampling, np.minimum(after + most, end))
        except Exception:  # the slots get no drafts, and fail when they need the blocks
            LOG.exception("the slots could not grow for drafts")
            appended = None
        room = self._allocator.capacity[sampling]
        limits = np.where(room > after, np.minimum(room + 1, end), 0)  # the last draft has no KV
        return limits.astype(np.int32), none if appended is None else appended
