"""A progress bar on standard error, or nothing."""

import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


class Progress:
    """A progress bar towards `total`. The bar is drawn only when enabled and on a terminal; rich is imported only then.

    total  0: the total is unknown; the elapsed time is shown instead, until `update` gives a total
    unit   "B": the bar shows bytes and their rate; any other unit: counts and the remaining time
    rate   redraws of the bar per second; choose it low during a measurement
    """

    def __init__(self, title: str, total: int, *, enabled: bool, unit: str, rate: float = 10.0) -> None:
        self._title, self._total, self._unit, self._rate = title, total, unit, rate
        self._enabled = enabled and sys.stderr.isatty()

    def __enter__(self) -> Self:
        self._bar = None
        if self._enabled:
            from rich.console import Console
            from rich.progress import Progress as Bar
            from rich.progress import SpinnerColumn, TimeElapsedColumn

            columns = _columns(self._unit) if self._total else (SpinnerColumn(), TimeElapsedColumn())
            self._bar = Bar(
                "{task.description}",
                *columns,
                console=Console(stderr=True),
                transient=True,
                refresh_per_second=self._rate,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total or None)
        return self

    def advance(self, count: int) -> None:
        """Move the bar by `count` more units of work that are done."""
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def update(self, done: int, total: int) -> None:
        """Set the bar to `done` of `total` units of work; `total` 0 means unknown."""
        if self._bar is None:
            return
        if total and not self._total:
            self._total = total
            self._bar.columns = ("{task.description}", *_columns(self._unit))
        self._bar.update(self._task, completed=done, total=total or None)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _columns(unit: str) -> "tuple[ProgressColumn, ...]":
    """Return the columns of a bar with a known total."""
    from rich import progress

    if unit == "B":
        return progress.BarColumn(), progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()
    return progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
