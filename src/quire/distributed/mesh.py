"""The groups of a rank: with whom it shares layers, and to whom it hands hidden states."""

from dataclasses import dataclass

from quire.distributed import Group


@dataclass(frozen=True)
class RankGroups:
    """The groups of a rank; None: it would be alone in the group.

    tp       ranks that share every layer of a stage
    pp       ranks with the same place in all stages, in the order of stages: hidden states go forward
    tokens   the ranks of `pp` once more: sampled tokens go from the last to the first. A group of its own, because
             messages of a group are ordered: two stages that send to each other would wait for each other
    ep       ranks of a stage, of all replicas, that divide the experts of every layer
    """

    tp: Group | None = None
    pp: Group | None = None
    tokens: Group | None = None
    ep: Group | None = None


ALONE = RankGroups()
