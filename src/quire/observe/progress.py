"""A progress bar on standard error, or nothing."""

import sys
from types import TracebackType
from typing import Self


class Progress:
    """Counts towards `total`. Draws only on a terminal and when enabled; rich is imported only then.

    unit   "B" shows bytes and GB/s, anything else counts with a rate per second
    """

    def __init__(self, title: str, total: int, *, enabled: bool, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._enabled = enabled and sys.stderr.isatty()

    def __enter__(self) -> Self:
        self._bar = None
        if self._enabled:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bar

            columns = (
                (DownloadColumn(), TransferSpeedColumn())
                if self._unit == "B"
                else (MofNCompleteColumn(), TimeRemainingColumn())
            )
            self._bar = Bar("{task.description}", BarColumn(), *columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total)
        return self

    def advance(self, count: int) -> None:
        """`count` more are done."""
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def update(self, done: int, total: int) -> None:
        """`done` of `total` are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
