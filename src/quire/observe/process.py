"""Usage of processes, delay of the event loop, and return of freed memory to the operating system.

Reads /proc; without /proc the usage is unknown (None). Knows nothing of metrics formats.
"""

import asyncio
import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
GARBAGE_SECONDS = 60.0  # 0.25 µs for each object that lives or is freed: 15 ms with 60,000


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None when the process is gone or the system has no /proc."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


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


async def collect_garbage() -> None:
    """Free objects that refer to each other, every `GARBAGE_SECONDS` until cancelled.

    A closed connection leaves some 7 of them: a transport of asyncio, with its socket and addresses. Those that Python
    has moved to its older generations would wait for millions of others, and the process would grow for days.
    """
    while True:
        await asyncio.sleep(GARBAGE_SECONDS)
        gc.collect()
