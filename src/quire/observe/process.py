"""Usage of processes, delay of the event loop, and return of freed memory to the operating system.

Reads /proc; without /proc the usage is unknown (None). Knows nothing of metrics formats.
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclass(frozen=True)
class ProcessUsage:
    """Usage of a process: resident bytes, and user plus system seconds of all its threads."""

    resident_bytes: int
    cpu_seconds: float


def read_usage(pid: int) -> ProcessUsage | None:
    """Return the usage of a process; None when the process is gone or the system has no /proc."""
    folder = Path(f"/proc/{pid}")
    try:
        after_name = (folder / "stat").read_text().rpartition(")")[2].split()
        resident_pages = int((folder / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    ticks = int(after_name[11]) + int(after_name[12])  # utime and stime, fields 14 and 15 of proc(5)
    return ProcessUsage(resident_pages * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK"))


def age() -> float | None:
    """Return the seconds since this process started, to a hundredth; None when the system does not tell."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # starttime, field 22 of proc(5), since the boot
        seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, IndexError, ValueError, AttributeError):
        return None
    return seconds if seconds >= 0 else None


def keep_little_memory() -> None:
    """Make glibc return freed memory to the system early: blocks and free heap ends of 1 MiB and more.

    By default these thresholds (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD) grow to 32 and 64 MiB once large blocks were freed.
    """
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            set_option(option, 2**20)


def return_memory() -> None:
    """Return the freed memory of this process to the system. Works with glibc; has no effect elsewhere.

    Takes 0.1 s per GB. Other Python threads run meanwhile.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))


async def watch_event_loop(report: Callable[[float], None], interval: float = 0.5) -> None:
    """Measure the delay of the event loop until cancelled: sleep `interval` seconds, then report the excess time.

    report   gets the seconds by which the sleep took too long; every connection waits so long for the event loop
    """
    while True:
        asked = time.perf_counter() + interval
        await asyncio.sleep(interval)
        report(max(0.0, time.perf_counter() - asked))
