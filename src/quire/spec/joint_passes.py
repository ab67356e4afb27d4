"""The passes of a drafter whose layers share experts with other replicas in lock-step: all replicas make the same ones.

    replica 0: 3 decodes, 2 drafts each     first pass (9 rows at most), second pass (3 rows), the model's layers
    replica 1: a chunk of a prompt          joins both passes, the model's layers, a pass over the chunk
    replica 0                               joins that pass

The record of the step (`DraftSync`) says how many rows each replica has in each pass at most. Only the device of a
replica knows how many tokens were accepted. Exchanges pad rows to that number, or to a bound that holds for all
replicas: then the number of exchanges and their bounds depend on the bound of the step and the number of passes alone,
so that one replica may replay a CUDA graph where another one launches its kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.contracts.step import DraftSync
from quire.layers.context import ReplicaTokens, StepContext
from quire.spec.draft_passes import Pass


@dataclass(frozen=True)
class StepPasses:
    """The passes of a step, equal on all replicas but for `own`.

    sync    drafts and decodes of the step
    rows    tokens of each replica in the step
    bound   bound of an exchange of the step's tokens; 0: exchanges are made for exact numbers
    seqs    most decodes of a replica that a pass has room for; 0: as many as a replica may run
    once    True: each layer has one exchange, because no replica has more than `bound` rows in the step or in a pass
    own     True: this replica has prompts, and makes their pass itself
    """

    sync: DraftSync = DraftSync(0, (), ())
    rows: tuple[int, ...] = (0,)
    bound: int = 0
    seqs: int = 0
    once: bool = False
    own: bool = False


class JointPasses:
    """Rows of all replicas in the passes of a step, and this replica's part in passes in which it has none.

    passes     layers that draft
    seqs       most decodes of a replica
    width      most rows of a decode in a first pass: 1 + the most drafts
    """

    def __init__(self, passes: Pass, seqs: int, width: int, device: torch.device) -> None:
        self._pass, self._seqs, self._width = passes, seqs, width
        self._empty = StepContext(torch.empty(0, dtype=torch.int64, device=device), (), [])
        self._none = torch.zeros(1, dtype=torch.int32, device=device)
        self._step = StepPasses()

    @property
    def count(self) -> int:
        """Most drafts of a decode of any replica in this step: the number of passes."""
        return self._step.sync.most

    @property
    def own_prompts(self) -> bool:
        """True if this replica has prompts in this step, whose entries it makes at the end."""
        return self._step.own

    def take(self, step: StepPasses) -> None:
        """Take the passes of the step that comes next."""
        self._step = step

    def rows(self, most: int, count: Tensor) -> ReplicaTokens:
        """Return the rows of a pass in which each decode has at most `most`. count: see `ReplicaTokens`"""
        step = self._step
        bound = min(step.bound, (step.seqs or self._seqs) * most)
        return ReplicaTokens(() if step.once else tuple(each * most for each in step.sync.decodes), count, bound)

    def prompts(self, count: Tensor) -> ReplicaTokens | None:
        """Return the rows of the pass at the end of a step; None: no replica has prompts, which that pass is for."""
        step = self._step
        if not any(step.sync.prompts):
            return None
        every = zip(step.rows, step.sync.prompts, strict=True)
        return ReplicaTokens(() if step.once else tuple(rows if has else 0 for rows, has in every), count, step.bound)

    def join_drafts(self) -> None:
        """Join the passes of the decodes of other replicas. This one has no decodes."""
        for most in self._widths():
            self._join(self.rows(most, self._none))

    def join_prompts(self) -> None:
        """Join the pass at the end of a step with prompts of other replicas, if there are any and this one has none."""
        if not self.own_prompts and (rows := self.prompts(self._none)) is not None:
            self._join(rows)

    def _widths(self) -> Iterator[int]:
        """Yield the most rows of a decode in each pass before the layers of the step."""
        if any(self._step.sync.decodes):
            yield self._width
            for ahead in range(1, self.count):
                yield 1 + ahead if self._pass.recurrent else 1

    def _join(self, rows: ReplicaTokens) -> None:
        self._pass.join(replace(self._empty, replicas=rows))
