"""The process of a rank: `python -m quire.assemble.rank_process`. Only an engine of several ranks starts it."""

from quire.assemble.rank_child import build_rank
from quire.procs.rank_server import run_rank

if __name__ == "__main__":
    run_rank(build_rank)
