"""A copy job has ended when all ranks say so, and a block that a rank lacks has failed."""

from quire.contracts.step import FinishedCopy
from quire.ranks.executor import CopyReports


def test_reports_of_all_ranks_are_one() -> None:
    joined = CopyReports(3)
    assert joined.join([FinishedCopy(id=0, num_bytes=4, seconds=1.0), FinishedCopy(id=1)]) == ()
    assert joined.join([FinishedCopy(id=0, failed=(2,), num_bytes=4, seconds=3.0)]) == ()
    assert joined.join([FinishedCopy(id=1), FinishedCopy(id=0, failed=(0, 2), num_bytes=4, error="full")]) == (
        FinishedCopy(id=0, failed=(0, 2), num_bytes=12, seconds=3.0, error="full"),
    )
    assert joined.join([FinishedCopy(id=1)]) == (FinishedCopy(id=1),) and not joined._reports
