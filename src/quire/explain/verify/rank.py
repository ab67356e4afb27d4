"""The process of a rank for `quire verify`: the rank of any engine, whose model runner records its steps on request."""

from quire.assemble.loaded import Loading
from quire.assemble.rank_child import ChildRank, ChildRunner
from quire.assemble.rank_child import build_rank as build
from quire.explain.verify.recorder import Recorder


class RecordedRank(ChildRank):
    """A rank in its process, its weights loaded."""

    def size(self, payload: bytes) -> ChildRunner:
        """Make the KV cache and the model runner, which has a `Recorder`."""
        running = super().size(payload)
        worker = running.parts.worker
        assert worker is not None
        worker.features.attach(Recorder(worker, running.parts.plan.mesh.rank))
        return running


def build_rank(start: bytes, on_loading: Loading) -> RecordedRank:
    """Join the other ranks and load the model; see `quire.assemble.rank_child`."""
    rank = build(start, on_loading)
    return RecordedRank(rank.loaded, rank.groups, rank.device, rank.note)
