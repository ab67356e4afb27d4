"""Times of calls, for a profile: which function ran when, and nothing else, so that steps stay nearly as fast.

`CallRecorder` (`calls.py`) tells more of a call, shapes and reasons, and takes longer. Runs without PyTorch.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any

from quire.observe.calls import Stop, put

Slice = tuple[str, str, int, int]  # track, name, begin in nanoseconds since 1970, nanoseconds


class CallTimes:
    """Context manager that notes the time of each call of given functions, by any thread.

    stops   as those of a `CallRecorder`; functions without a name of their own and coroutines are left out
    most    calls to note; later ones only count as `lost`
    """

    def __init__(self, stops: Iterable[Stop], most: int) -> None:
        self._stops, self._most = stops, most
        self._calls: list[tuple[int, str, int, int]] = []  # thread, name, begin and end by the clock of perf_counter
        self._undo = ExitStack()
        self.lost = 0

    def __enter__(self) -> "CallTimes":
        try:
            for owner, attribute, name in {stop[:2]: stop for stop in self._stops}.values():
                function = getattr(owner, attribute)
                if name and not iscoroutinefunction(function):
                    put(self._undo, owner, attribute, self._timed(function, name))
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()

    def slices(self) -> list[Slice]:
        """Return the calls, in the order of their ends. A track is a thread."""
        since = time.time_ns() - time.perf_counter_ns()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return [
            (f"calls, {names.get(thread, 'a thread that ended')}", name, begin + since, end - begin)
            for thread, name, begin, end in self._calls
        ]

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        calls, most, clock, ident = self._calls, self._most, time.perf_counter_ns, threading.get_ident

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            try:
                return function(*args, **kwargs)
            finally:
                if len(calls) < most:
                    calls.append((ident(), name, begin, clock()))
                else:
                    self.lost += 1

        return timed
