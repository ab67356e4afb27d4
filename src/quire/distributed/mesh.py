"""The groups of a rank: with whom it shares layers, and to whom it hands hidden states."""

from dataclasses import dataclass

from quire.distributed import Group
from quire.kernels.comm.exchange import Slots


@dataclass(frozen=True)
class RankGroups:
    """The groups that a rank belongs to; None: the rank would be alone in the group.

    tp       tensor parallelism: ranks that share every layer of a pipeline stage
    dcp      ranks of `tp` that divide the tokens of contexts, or all of these
    pp       pipeline parallelism: a rank of each stage, in the order of stages; hidden states go forward
    tokens   the ranks of `pp` in a second group: sampled tokens go from the last stage to the first. Messages of one
             group are ordered, so two stages that send to each other in one group would wait for each other
    slots    memory of the ranks of `ep` for dispatcher "pull"
    draft_slots   the same for the experts of a draft model, whose rows have other sizes
    movers   all ranks in a second group, for moves of experts beside the steps
    ep       expert parallelism: ranks of a pipeline stage, of all replicas, that divide the experts of every layer
    """

    tp: Group | None = None
    dcp: Group | None = None
    pp: Group | None = None
    tokens: Group | None = None
    ep: Group | None = None
    movers: Group | None = None
    slots: Slots | None = None
    draft_slots: Slots | None = None

    @property
    def replicas(self) -> int:
        """Number of replicas in lock-step, this one included."""
        return 1 if self.ep is None else self.ep.size // (1 if self.tp is None else self.tp.size)

    @property
    def stage(self) -> tuple[int, ...]:
        """Numbers of the ranks in `movers` that divide the experts of this rank's layers, of all replicas."""
        assert self.movers is not None
        tp = 1 if self.tp is None else self.tp.size
        stage, pp = (0, 1) if self.pp is None else (self.pp.rank, self.pp.size)
        return tuple(number for number in range(self.movers.size) if number // tp % pp == stage)


ALONE = RankGroups()
