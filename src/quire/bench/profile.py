"""GPU profile of a workload: time by kernel, between kernels and between steps. Needs PyTorch's profiler."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from quire.bench.offline import OfflineBench
from quire.bench.workload import Workload

LAST_OF_STEP = "_finish_kernel"  # the last kernel of every step


class Event(NamedTuple):
    """A kernel or a copy on the GPU. Times are in nanoseconds."""

    name: str
    start: int
    duration: int


def profile_workload(bench: OfflineBench, work: Workload) -> dict[str, Any]:
    """Run a workload twice and trace the second run. Return the row of that run, with the fields of `where_time_goes`.

    The times of the row are those of a traced run, which takes longer.
    """
    from torch.profiler import ProfilerActivity, profile

    list(bench.throughput([work], 1))
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        (row,) = bench.throughput([work], 1)
    found = traced.profiler.kineto_results.events()  # traced.events() is slow
    return row | where_time_goes(
        Event(event.name(), event.start_ns(), event.duration_ns())
        for event in found
        if event.device_type().name == "CUDA"
    )


def where_time_goes(events: Iterable[Event]) -> dict[str, Any]:
    """Return the times of kernels and of the gaps between them, as a dict with three entries.

    kernels   name, calls, total_ms, share and us (per call) of each, most time first; overlapping ones count in full
    idle      total_ms and share of the time in which nothing ran on the GPU
    steps     us_p50: time from the end of a step to the end of the next; gap_us_p50, gap_us_p99: time from the last
              kernel of a step to the first of the next. Only steps with the most common number of launches count, which
              are usually decodes. None without steps

    A share is a part of the time from the start of the first event to the end of the last.
    """
    ordered = sorted(events, key=lambda event: event.start)
    if not ordered:
        return {"kernels": [], "idle": {"total_ms": 0.0, "share": 0.0}, "steps": None}
    idle, end = 0, ordered[0].start
    calls, times = Counter[str](), Counter[str]()
    for name, start, duration in ordered:
        idle += max(0, start - end)
        end = max(end, start + duration)
        calls[name] += 1
        times[name] += duration
    span = max(1, end - ordered[0].start)
    kernels = [
        {
            "kernel": name,
            "calls": calls[name],
            "total_ms": round(spent / 1e6, 3),
            "share": round(spent / span, 4),
            "us": round(spent / calls[name] / 1e3, 2),
        }
        for name, spent in times.most_common()
    ]
    return {
        "kernels": kernels,
        "idle": {"total_ms": round(idle / 1e6, 3), "share": round(idle / span, 4)},
        "steps": _steps(ordered),
    }


def _steps(ordered: list[Event]) -> dict[str, Any] | None:
    last = [i for i, event in enumerate(ordered) if LAST_OF_STEP in event.name]
    sizes = Counter(b - a for a, b in pairwise(last))
    if not sizes:
        return None
    ((usual, count),) = sizes.most_common(1)
    times, gaps = [], []
    for a, b in pairwise(last):
        if b - a == usual:
            ended = ordered[a].start + ordered[a].duration
            first = next(event for event in ordered[a + 1 : b + 1] if not event.name.startswith(("Memcpy", "Memset")))
            gaps.append(max(0, first.start - ended))
            times.append(ordered[b].start + ordered[b].duration - ended)
    gaps.sort()
    return {
        "count": count,
        "launches": usual,
        "us_p50": round(sorted(times)[count // 2] / 1e3, 2),
        "gap_us_p50": round(gaps[count // 2] / 1e3, 2),
        "gap_us_p99": round(gaps[count * 99 // 100] / 1e3, 2),
    }
