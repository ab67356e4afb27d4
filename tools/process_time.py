"""Processor time of another process, for the tools that measure servers."""

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float | None:
    """Return the user and system seconds of all threads of a process; None if it is gone or there is no /proc."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(after_name[11]) + int(after_name[12])  # utime and stime, fields 14 and 15 of proc(5)
    except (OSError, IndexError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")
