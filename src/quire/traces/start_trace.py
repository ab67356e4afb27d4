"""Trace of a start, from the options to an engine that is ready: `quire trace --from start`.

Every public function of Quire that this process calls is recorded by Python's profiler hook, so nothing is written down
beforehand. Kept are those that take part of the time, and those that decide: functions of `plan`, `config`, `args`,
`quantization` and `platforms` whose result has a reason. Times are those of a start under the hook, which slows Python
code down; files, devices and kernels take the time that they always take. Python's garbage collector is off meanwhile:
it would walk the recorded calls again and again, and its time would stand at whichever function runs then.
"""

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter_ns
from types import CodeType, FrameType, TracebackType
from typing import Any

from quire.kernels.select import Choice
from quire.observe.calls import PACKAGE, Span

DECIDING = ("plan", "config", "args", "quantization", "platforms")  # rooms whose results may have a reason
LEAST = 0.004  # share of the whole time that a call takes at least to be kept
WIDEST = 160  # characters of a result
SKIPPED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class StartRecorder:
    """Context manager that records the calls of this thread in the `Span` `root`."""

    def __init__(self, name: str) -> None:
        self.root = Span(name, "")
        self._stack, self._codes = [self.root], dict[CodeType, tuple[str, str, bool] | None]()
        self._depth = list[bool]()  # of each Python function that runs: whether it has a span
        self._collects = False

    def __enter__(self) -> "StartRecorder":
        self._collects = gc.isenabled()
        gc.disable()
        self.root.begin = perf_counter_ns()
        sys.setprofile(self._event)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.setprofile(None)
        self.root.end = perf_counter_ns()
        _prune(self.root, self.root.seconds * LEAST, set())
        if self._collects:
            gc.enable()

    def _event(self, frame: FrameType, event: str, result: Any) -> None:
        if event == "call":
            known = self._codes.get(frame.f_code, ())
            if known == ():
                known = self._codes[frame.f_code] = _known(frame.f_code)
            self._depth.append(bool(known))
            if known:
                span = Span(known[0], known[1], begin=perf_counter_ns())
                self._stack[-1].inside.append(span)
                self._stack.append(span)
        elif event == "return" and self._depth and self._depth.pop():
            span = self._stack.pop()
            span.end = perf_counter_ns()
            known = self._codes[frame.f_code]
            span.gives = _told(result, bool(known and known[2]))


def _known(code: CodeType) -> tuple[str, str, bool] | None:
    """Return (name, "file:line", True in a room that decides) of a public function of Quire, else None."""
    path = Path(code.co_filename)
    if code.co_flags & SKIPPED or not path.is_relative_to(PACKAGE):
        return None
    inside = path.relative_to(PACKAGE)
    parts = code.co_qualname.split(".")
    if any(part.startswith(("_", "<")) and part != "__init__" for part in parts):
        return None
    name = code.co_qualname.removesuffix(".__init__")
    return name, f"{inside}:{code.co_firstlineno}", inside.parts[0] in DECIDING


def _told(result: Any, decides: bool) -> str:
    """Return a result in words: a value and its reason of a room that decides, and short numbers and texts."""
    reason = getattr(result, "reason", None) if decides else None
    if isinstance(reason, str) and reason:
        value = next((getattr(result, key) for key in ("dtype", "name", "value") if hasattr(result, key)), "")
        return f"{value} ({reason})".strip()[:WIDEST]
    if isinstance(result, list | tuple) and result and all(isinstance(one, Choice) for one in result):
        return ", ".join(f"{one.op}: {one.name}" for one in result) + " (each with its reason in quire explain)"
    if isinstance(result, int | float | Path) and not isinstance(result, bool) or isinstance(result, str) and result:
        return str(result).splitlines()[0][:WIDEST]
    return ""


def _prune(span: Span, least: float, told: set[tuple[str, str]]) -> bool:
    """Join equal calls inside a call, neighbours or not. Drop those that take less than `least` seconds together.

    told   name and result of calls that have told their reason: a second call with the same one tells nothing
    Calls that tell a reason stay as they are. Return True if the call tells one, or a call inside it.
    """
    reasons = [_prune(one, least, told) for one in span.inside]
    kept, by_key = list[Span](), dict[tuple[str, str], Span]()
    for one, reason in zip(span.inside, reasons, strict=True):
        first = one if reason else by_key.setdefault((one.name, one.gives), one)
        if first is one:
            kept.append(one)
            continue
        first.joined = max(1, first.joined) + 1
        first.end += one.end - one.begin  # a span of several calls has their time
        first.inside = []
    reasoned = {id(one) for one, reason in zip(span.inside, reasons, strict=True) if reason}
    span.inside = [one for one in kept if one.seconds >= least or id(one) in reasoned]
    new = span.gives.endswith(")") and (span.name, span.gives) not in told
    told.add((span.name, span.gives))
    return new or any(reasons)


def start_lines(span: Span, depth: int = 0) -> Iterator[str]:
    """Yield the lines of a recorded start."""
    gives = f"  -> {span.gives}" * bool(span.gives)
    times = f", {span.joined} times" * bool(span.joined)
    yield f"{1e3 * span.seconds:9.3f} ms  {'  ' * depth}{span.name}{times}  {span.where}{gives}".rstrip()
    for one in span.inside:
        yield from start_lines(one, depth + 1)


def trace_start(build: Callable[[], Any], name: str) -> tuple[Any, Span]:
    """Return what `build` makes, and the calls that it made. It runs in this thread."""
    with StartRecorder(name) as recorder:
        made = build()
    return made, recorder.root
