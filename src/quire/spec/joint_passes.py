"""The passes of a drafter whose layers share experts with other replicas in lock-step: all replicas make the same ones.

    replica 0: 3 decodes, 2 drafts each     first pass (9 rows at most), second pass (3 rows), the model's layers
    replica 1: a chunk of a prompt          joins both passes, the model's layers, a pass over the chunk
    replica 0                               joins that pass

The record of the step (`DraftSync`) says how many rows each replica has in each pass at most. Only the device of a
replica knows how many tokens were accepted. Exchanges pad rows to that number.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quire.contracts.step import DraftSync
from quire.layers.context import ReplicaTokens, StepContext
from quire.spec.draft_passes import Pass

NONE = DraftSync(0, (), ())


class JointPasses:
    """Rows of all replicas in the passes of a step, and this replica's part in passes in which it has none.

    passes     layers that draft
    width      most rows of a decode in a first pass: 1 + the most drafts
    """

    def __init__(self, passes: Pass, width: int, device: torch.device) -> None:
        self._pass, self._width = passes, width
        self._empty = StepContext(torch.empty(0, dtype=torch.int64, device=device), (), [])
        self._none = torch.zeros(1, dtype=torch.int32, device=device)
        self._sync, self._rows = NONE, (0,)

    @property
    def count(self) -> int:
        """Most drafts of a decode of any replica in this step: the number of passes."""
        return self._sync.most

    def take(self, sync: DraftSync | None, rows: tuple[int, ...]) -> None:
        """Take the record of the step that comes next. rows: tokens of each replica"""
        self._rows = rows
        self._sync = sync or DraftSync(0, (0,) * len(rows), (False,) * len(rows))

    def rows(self, most: int, count: Tensor) -> ReplicaTokens:
        """Return the rows of a pass in which each decode has at most `most`. count: see `ReplicaTokens`"""
        return ReplicaTokens(tuple(decodes * most for decodes in self._sync.decodes), count)

    def prompts(self, count: Tensor) -> ReplicaTokens | None:
        """Return the rows of the pass at the end of a step; None: no replica has prompts, which that pass is for."""
        if not any(self._sync.prompts):
            return None
        every = zip(self._rows, self._sync.prompts, strict=True)
        return ReplicaTokens(tuple(rows if has else 0 for rows, has in every), count)

    def join_drafts(self) -> None:
        """Join the passes of the decodes of other replicas. This one has no decodes."""
        for most in self._widths():
            self._join(self.rows(most, self._none))

    def join_prompts(self) -> None:
        """Join the pass at the end of a step with prompts of other replicas. This one has none."""
        if (rows := self.prompts(self._none)) is not None:
            self._join(rows)

    def _widths(self) -> Iterator[int]:
        """Yield the most rows of a decode in each pass before the layers of the step."""
        if any(self._sync.decodes):
            yield self._width
            for ahead in range(1, self._sync.most):
                yield 1 + ahead if self._pass.recurrent else 1

    def _join(self, rows: ReplicaTokens) -> None:
        self._pass.join(replace(self._empty, replicas=rows))
