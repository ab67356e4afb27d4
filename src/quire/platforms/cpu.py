"""Facts about the CPU this process runs on: cores, memory, bfloat16 units.

Reads `/proc` with the standard library only (no torch), so that any command can use it. Knows nothing of kernels.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from quire.config.env import cpu_without

# x86 flags, and the arm64 `Features` word
BF16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
HUGE_PAGE = 2 << 20  # bytes of a page in which weights and caches lie, if the system has them
ASSUMED_MEMORY = 4 << 30  # bytes, if the system does not tell


@dataclass(frozen=True, kw_only=True)
class CpuFacts:
    """Facts about the CPU, as seen by this process.

    cores          physical cores that this process may use
    free_memory    bytes that could be allocated without swapping, at the time of reading
    total_memory   bytes
    bf16_units     instruction sets that make bfloat16 arithmetic the fastest, best first; empty: float32 is faster
    """

    cores: int
    free_memory: int
    total_memory: int
    bf16_units: tuple[str, ...]


def read_cpu_flags() -> frozenset[str]:
    """Return the names of instruction sets in /proc/cpuinfo; empty if there is no such file."""
    return _cpu_flags(_read(Path("/proc/cpuinfo")))


def read_cpu_facts() -> CpuFacts:
    """Read cores, memory and bfloat16 instruction sets of this machine. Takes a few milliseconds."""
    cpuinfo = _read(Path("/proc/cpuinfo"))
    words = _cpu_flags(cpuinfo)
    free, total = _memory()
    return CpuFacts(
        cores=_physical_cores(cpuinfo),
        free_memory=free,
        total_memory=total,
        bf16_units=tuple(unit for unit in BF16_UNITS if unit in words),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cpu_flags(cpuinfo: str) -> frozenset[str]:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return frozenset(value.split()) - cpu_without()
    return frozenset()


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical_cores(cpuinfo: str) -> int:
    """Count the allowed physical cores: threads of one core count once."""
    allowed = _allowed_cpus()
    cores: set[tuple[str, str]] = set()
    for entry in cpuinfo.split("\n\n"):
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in entry.splitlines())}
        if not {"processor", "physical id", "core id"} <= fields.keys():
            continue
        if int(fields["processor"]) in allowed:
            cores.add((fields["physical id"], fields["core id"]))
    return len(cores) or len(allowed)


def _memory() -> tuple[int, int]:
    """Return (free, total) bytes; a container's limit counts if it is smaller."""
    fields: dict[str, int] = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        fields[key] = int(value.split()[0]) * 1024
    if "MemTotal" not in fields:
        return _memory_without_proc()
    free, total = fields.get("MemAvailable", fields["MemTotal"]), fields["MemTotal"]
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    if limit.isdigit():
        used = int(_read(Path("/sys/fs/cgroup/memory.current")).strip() or 0)
        free, total = min(free, max(int(limit) - used, 0)), min(total, int(limit))
    return free, total


def _memory_without_proc() -> tuple[int, int]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return ASSUMED_MEMORY, ASSUMED_MEMORY
    return total // 2, total
