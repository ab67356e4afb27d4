"""Curves of the processes of the chaos run: memory, descriptors and threads over time, and their slopes."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from servers import Server

GAP = 30.0  # seconds without a process id: another process has it now


class Sample(NamedTuple):
    """State of a process. seconds: since the start of the run · kib: resident memory"""

    seconds: float
    kib: int
    descriptors: int
    threads: int


class Curves:
    """Samples of every process, by server, role and process id. most: samples that are kept of each, then every second
    one goes"""

    def __init__(self, servers: list[Server], most: int = 4000) -> None:
        self.curves: dict[tuple[str, str, int], list[Sample]] = {}
        self._servers, self._most, self._began = servers, most, time.monotonic()

    def look(self) -> None:
        """Take a sample of every process that runs."""
        for server in self._servers:
            for role, pid in server.roles().items():
                with suppress(OSError, IndexError, StopIteration):
                    curve, sample = self.curves.setdefault((server.name, role, pid), []), self._sample(pid)
                    if curve and sample.seconds - curve[-1].seconds > GAP:
                        curve.clear()  # of another process that had the same id
                    curve.append(sample)
        for curve in self.curves.values():
            if len(curve) > self._most:
                del curve[1::2]

    def _sample(self, pid: int) -> Sample:
        rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        num_open = len(os.listdir(f"/proc/{pid}/fd"))
        return Sample(time.monotonic() - self._began, int(rows["VmRSS"].split()[0]), num_open, int(rows["Threads"]))

    def long_lived(self, seconds: float) -> dict[tuple[str, str, int], list[Sample]]:
        """Return the last half of the curves of processes that were seen for so long: caches fill in the first one."""
        found = {}
        for key, curve in self.curves.items():
            life = curve[-1].seconds - curve[0].seconds
            if life >= seconds:
                found[key] = [one for one in curve if one.seconds >= curve[0].seconds + life / 2]
        return found


def slope(curve: list[Sample], field: int) -> float:
    """Return the slope of a field by least squares, in its unit per hour."""
    count = len(curve)
    if count < 3:
        return 0.0
    x, y = [one.seconds / 3600 for one in curve], [float(one[field]) for one in curve]
    mx, my = sum(x) / count, sum(y) / count
    spread = sum((a - mx) ** 2 for a in x)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
