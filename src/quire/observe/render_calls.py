"""Views of recorded calls: lines for a terminal, and events for Perfetto. Runs without PyTorch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from quire.contracts.errors import ConfigError
from quire.observe.calls import RANK, Shown, Span, fold

HTTP, CORE, CLIENT = "HTTP process", "engine core", "client"  # spans of a stay in a process, with the calls in it
CPU, DEVICE = "CPU", "device"  # the lanes of two steps in flight
TRACKS = {CLIENT: 1001, HTTP: 1002, CORE: 1003, CPU: 1004, DEVICE: 1005}  # rank 0 has track 2


def render(span: Span, shown: Shown | None) -> Iterator[str]:
    """Yield the lines of the tree of a call.

    shown   calls that were drawn before, see `fold`; None = draw all calls
    """
    return _lines(span if shown is None else fold(span, shown), 0)


def _lines(span: Span, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if span.phase:
        yield from ("", f"{' ' * 14}{indent}{span.phase}")
    shapes = f"  ({span.takes}){' -> ' * bool(span.gives)}{span.gives}" if span.takes or span.gives else ""
    line = f"{1e3 * span.seconds:9.3f} ms  {indent}{span.name}  {span.where}{shapes}{'  (as before)' * span.again}"
    yield line.rstrip()
    for words in (span.way, f"decided from: {span.decided}" * bool(span.decided)):
        if words:
            yield f"{' ' * 14}{indent}{words}"
    for inner in span.inside:
        yield from _lines(inner, depth + 1)


def events(span: Span, origin: int, phase: str = "entry", track: int = 1) -> Iterator[dict[str, object]]:
    """Yield trace events of a call and of all calls inside it, for Perfetto or chrome://tracing.

    origin         time 0 of the events, in nanoseconds of the span's clock
    phase, track   category and track of the call; a span with a phase, of a process or of a rank, has its own
    """
    phase = span.phase or phase
    if found := RANK.match(span.name):
        track = int(found[1]) + 2
        yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": span.name}}
    told = {"function": span.name, "where": span.where, "takes": span.takes, "gives": span.gives, "way": span.way}
    told |= {"decided": span.decided} if span.decided else {}
    if span.name in TRACKS:  # a coroutine may go on after a stay: only the calls are drawn
        track = TRACKS[span.name]
        yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": span.name}}
    else:
        yield {
            "name": span.phase or span.name,
            "cat": phase,
            "ph": "X",
            "ts": (span.begin - origin) / 1e3,
            "dur": (span.end - span.begin) / 1e3,
            "pid": 1,
            "tid": track,
            "args": told,
        }
    for number, inner in enumerate(span.inside, 1):
        if inner.joined and span.inside[number:]:  # its time may lie in several places: events must not overlap
            inner = replace(inner, end=min(inner.end, span.inside[number].begin))
        yield from events(inner, origin, phase, track)


def write_events(out: Path, found: Span) -> None:
    """Write the events of a call to a file for Perfetto. Raises `ConfigError` if it cannot be written."""
    try:
        out.write_bytes(msgspec.json.encode({"traceEvents": list(events(found, found.begin))}))
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written ({error.strerror}): choose another file.") from None
