"""Libraries of native kernels that a wheel carries, one for each x86-64 level; `setup.py` makes them.

A library of a level runs on every CPU of that level, and uses no vector unit beyond the level. So it is as fast as a
library compiled here only if this CPU has no further unit that the kernels use (AVX512-VNNI, AMX, ...).

The name of a library holds a hash of sources and flags: a library of other sources is not loaded.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.kernels.native.build import BASE_FLAGS, NEEDED, USED, WIDE, compile_for, hash_sources, intact, units

FOLDER = Path(__file__).parent / "prebuilt"
LEVELS = {"v4": frozenset(NEEDED | WIDE), "v3": frozenset(NEEDED)}  # CPU flags that the kernels use, best level first


def level_of(cpu_flags: frozenset[str]) -> str:
    """Return the best level that a CPU with these flags of /proc/cpuinfo has, or "" if it has none."""
    return next((level for level, needed in LEVELS.items() if needed <= cpu_flags), "")


def lacking(cpu_flags: frozenset[str]) -> list[str]:
    """Return the compiler flags of vector units that the kernels use on this CPU, and that its level lacks.

    A flag that only adds a hint (USED) does not count.
    """
    level = units(LEVELS[level_of(cpu_flags)])
    return [flag for flag in units(cpu_flags) if flag not in level and flag not in USED.values()]


def shipped(cpu_flags: frozenset[str]) -> Path | None:
    """Return the path of the library that this installation carries for a CPU with these flags, or None."""
    level = level_of(cpu_flags)
    path = _path(FOLDER, level) if level and FOLDER.is_dir() else None
    return path if path and intact(path) else None


def make(folder: Path) -> list[Path]:
    """Compile the library of each level into `folder`. Raises `CannotBuild` without a compiler for x86-64 Linux."""
    folder.mkdir(parents=True, exist_ok=True)

    def compiled(level: str) -> Path:
        path = _path(folder, level)
        compile_for(units(LEVELS[level]), path)
        return path

    with ThreadPoolExecutor() as threads:  # a compiler takes 15 s, and uses one core
        return list(threads.map(compiled, LEVELS))


def _path(folder: Path, level: str) -> Path:
    digest = hashlib.sha256(" ".join([*BASE_FLAGS, *units(LEVELS[level])]).encode())
    hash_sources(digest)
    return folder / f"quire-{level}-{digest.hexdigest()[:20]}.so"
