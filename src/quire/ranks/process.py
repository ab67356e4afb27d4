"""The process of a rank: `python -m quire.ranks.process MODULE SOCKET`. An engine of several ranks starts it."""

from quire.ranks.server import run_rank

if __name__ == "__main__":
    run_rank()
