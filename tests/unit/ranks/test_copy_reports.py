"""A job has ended when all ranks say so; a block that a rank lacks has failed, and a load that failed on one."""

from quire.contracts.adapters import AdapterLoaded
from quire.contracts.step import FinishedCopy
from quire.ranks.executor import RankReports, joined_copies, joined_loads


def test_reports_of_all_ranks_are_one() -> None:
    joined = RankReports(3, joined_copies)
    assert joined.join([FinishedCopy(id=0, num_bytes=4, seconds=1.0), FinishedCopy(id=1)]) == ()
    assert joined.join([FinishedCopy(id=0, failed=(2,), num_bytes=4, seconds=3.0)]) == ()
    assert joined.join([FinishedCopy(id=1), FinishedCopy(id=0, failed=(0, 2), num_bytes=4, error="full")]) == (
        FinishedCopy(id=0, failed=(0, 2), num_bytes=12, seconds=3.0, error="full"),
    )
    assert joined.join([FinishedCopy(id=1)]) == (FinishedCopy(id=1),) and not joined._reports


def test_a_load_has_failed_if_one_rank_s_has() -> None:
    joined = RankReports(2, joined_loads)
    assert joined.join([AdapterLoaded(id=4, seconds=1.0)]) == ()
    assert joined.join([AdapterLoaded(id=4, error="no room", seconds=0.5, read=True)]) == (
        AdapterLoaded(id=4, error="no room", seconds=1.0, read=True),
    )
