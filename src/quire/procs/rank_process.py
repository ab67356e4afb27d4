"""The process of a rank: `python -m quire.procs.rank_process MODULE SOCKET`. An engine of several ranks starts it."""

from quire.procs.rank_server import run_rank

if __name__ == "__main__":
    run_rank()
