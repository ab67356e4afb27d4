"""Checks of `quire doctor` on the machine: CPU, memory, GPUs, limits, disks, a port.

Reads /proc, /sys and nvidia-smi where they exist. Knows nothing of installed packages.
"""

import math
import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from quire.config.env import cache_folder, hub_cache
from quire.entry.cli.finding import BAD, OK, WARN, Finding
from quire.entry.cli.table import format_bytes
from quire.entry.http.sockets import port_holder
from quire.platforms.cpu import read_cpu_facts, read_cpu_flags
from quire.platforms.detect import resolve_device

UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16")
SMI_SECONDS = 20
LITTLE_MEMORY, LITTLE_DISK, LITTLE_SHM = 2 << 30, 5 << 30, 64 << 20
FEW_FILES = 4096
DEVICE_FIELDS = "index,name,driver_version,compute_cap,memory.used,memory.total"


def cpu() -> Iterator[Finding]:
    """Yield findings about cores, instruction sets, a container's CPU limit, and the load."""
    facts, flags = read_cpu_facts(), read_cpu_flags()
    units = [unit for unit in UNITS if unit in flags]
    yield Finding(
        "cpu",
        OK,
        f"{facts.cores} cores of {os.cpu_count()} logical, {platform.machine()}, "
        f"{', '.join(units) or 'instruction sets unknown'}",
    )
    if not facts.bf16_units:
        yield Finding("cpu", OK, "no AMX: bfloat16 models are computed in float32, their weights stay bfloat16")
    quota = _quota()
    if quota is not None and quota < facts.cores:
        yield Finding(
            "cpu limit",
            WARN,
            f"this container may use {quota:g} CPUs, and sees {facts.cores}",
            f"set --num-threads {max(1, math.floor(quota))}, or raise the container's limit",
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > facts.cores:
        yield Finding(
            "cpu load",
            WARN,
            f"load average {load:.1f} on {facts.cores} cores: other programs use the CPU",
            "stop them, or expect Quire to be slower",
        )


def _quota() -> float | None:
    """Return the number of CPUs that the container's limit allows; None without a limit."""
    try:
        words = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if words[0] == "max" else int(words[0]) / int(words[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        old = Path("/sys/fs/cgroup/cpu")
        quota, period = (int((old / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError):
        return None


def memory() -> Iterator[Finding]:
    """Yield findings about free memory and shared memory."""
    facts = read_cpu_facts()
    little = facts.free_memory < LITTLE_MEMORY
    yield Finding(
        "memory",
        WARN if little else OK,
        f"{format_bytes(facts.free_memory)} free of {format_bytes(facts.total_memory)}",
        "stop other programs, or use a small model" if little else "",
    )
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        yield Finding(
            "/dev/shm",
            WARN if free < LITTLE_SHM else OK,
            f"{format_bytes(free)} free",
            "in a container: docker run --shm-size 1g" if free < LITTLE_SHM else "",
        )


def gpus() -> Iterator[Finding]:
    """Yield findings about the GPUs that nvidia-smi shows, and the processes that hold GPU memory."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        yield Finding("gpu", OK, "nvidia-smi not found: no NVIDIA GPU, or no driver; Quire computes on the CPU")
        return
    try:
        rows = _smi(smi, f"--query-gpu={DEVICE_FIELDS}")
        holders = _smi(smi, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(
            "gpu",
            WARN,
            f"nvidia-smi failed ({type(error).__name__}): the driver may be broken",
            "reload or reinstall the NVIDIA driver",
        )
        return
    for index, name, driver, capability, used, total in (row for row in rows if len(row) == 6):
        yield Finding(f"gpu {index}", OK, f"{name}, driver {driver}, capability {capability}, {used} of {total} in use")
    for row in holders:
        yield Finding(
            "gpu memory",
            WARN,
            f"process {row[1]} ({row[2]}) holds {row[3]}" if len(row) == 4 else ", ".join(row),
            "stop it if you need the memory",
        )
    plan = resolve_device("auto")
    if rows and plan.device != "cuda":
        yield Finding("gpu", WARN, f"no GPU is used: {plan.reason}", "see --device")


def _smi(smi: str, query: str) -> list[list[str]]:
    done = subprocess.run(
        [smi, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=SMI_SECONDS, check=True
    )
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def limits() -> Iterator[Finding]:
    """Yield findings about the limits of this process that matter to a server, such as open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = hard != resource.RLIM_INFINITY and hard < FEW_FILES
    yield Finding(
        "open files",
        WARN if few else OK,
        f"{_limit(soft)}, can be raised to {_limit(hard)}",
        f"every connection needs one: ulimit -n {FEW_FILES * 4}" if few else "",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Finding("locked memory", OK, _limit(locked) if locked == resource.RLIM_INFINITY else format_bytes(locked))
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        yield Finding(
            "address space",
            WARN,
            f"limited to {format_bytes(space)}",
            "weights and KV cache must fit: ulimit -v unlimited",
        )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def disk() -> Iterator[Finding]:
    """Yield findings about free space and write permission in the folders of models and compiled kernels."""
    for name, folder in (("models", hub_cache()), ("kernels", cache_folder())):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        little = name == "models" and free < LITTLE_DISK
        yield Finding(
            f"disk: {name}",
            WARN if little else OK,
            f"{format_bytes(free)} free in {folder}",
            "remove models (`hf cache`), or set HF_HOME or --download-dir" if little else "",
        )
        if not os.access(there, os.W_OK):
            yield Finding(
                f"disk: {name}",
                WARN,
                f"{there} cannot be written by this user",
                "set HF_HOME or --download-dir" if name == "models" else "set QUIRE_CACHE_DIR",
            )


def port(number: int) -> Iterator[Finding]:
    """Yield a finding that says if a server could listen on the port, and names the process that holds the port."""
    if not 0 < number < 65536:
        yield Finding("port", BAD, f"{number} is not a port", "give --port 1..65535")
        return
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            holder = port_holder(number)
            who = f"in use by {holder}" if holder else f"cannot be taken ({error.strerror})"
            yield Finding("port", WARN, f"{number} is {who}", "stop that process, or serve on another --port")
            return
    yield Finding("port", OK, f"{number} is free")
