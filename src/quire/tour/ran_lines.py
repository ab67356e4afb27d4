"""Lines of functions that ran. The marks of a tour stand on these lines alone."""

import sys
from collections.abc import Iterable
from types import CodeType, FrameType, TracebackType
from typing import Any

Place = tuple[str, int]  # file and first line of a function


class RanLines:
    """Context manager that notes which lines of the given functions run in this thread.

    seen   line numbers by function; a function that did not run is not in it
    """

    def __init__(self, codes: Iterable[CodeType]) -> None:
        self._codes = frozenset(codes)
        self.seen: dict[Place, set[int]] = {}

    def __enter__(self) -> "RanLines":
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if (code := frame.f_code) not in self._codes:
            return None
        lines = self.seen.setdefault((code.co_filename, code.co_firstlineno), set())

        def ran(frame: FrameType, event: str, arg: Any) -> Any:
            lines.add(frame.f_lineno)
            return ran

        return ran
