"""The process of a rank: `python -m quire.entry.rank_process`. Only an engine of several ranks starts it."""

from collections.abc import Callable

from quire.procs.rank_server import LoadedRank, run_rank


def build(start: bytes, on_loading: Callable[[int, int], None]) -> LoadedRank:
    """Build the rank of a `RankTask` as JSON. Imports torch here: the engine core hears from the process meanwhile."""
    from quire.assemble.rank import build_rank

    return build_rank(start, on_loading)


if __name__ == "__main__":
    run_rank(build)
