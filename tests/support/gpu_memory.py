"""Memory of GPUs by process. Other tests use the same GPU at the same time, so its free memory tells nothing."""

import ctypes
import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch

from quire.platforms.cuda import _NOT_AVAILABLE, MAX_PROCESSES, NVML, _Process

END_SECONDS = 120  # until an engine notices a fault, or processes that ended have given their memory back


@cache
def _library() -> ctypes.CDLL:
    """The driver's management library; it stays open."""
    nvml = ctypes.CDLL(NVML)
    assert nvml.nvmlInit_v2() == 0
    return nvml


def held_by_process(gpu: int = 0) -> dict[int, int]:
    """Return process id -> bytes that it holds on a GPU. Skips the test where the driver does not tell."""
    nvml, handle = _library(), ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
    assert nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0
    found, count = (_Process * MAX_PROCESSES)(), ctypes.c_uint(MAX_PROCESSES)
    code = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found)
    used = {int(one.pid): int(one.used) for one in found[: count.value]}
    if code or _NOT_AVAILABLE in used.values():
        pytest.skip("the driver does not tell the memory of a process")
    return used


def held_by(pid: int) -> int:
    """Return the bytes that a process holds on the first GPU: context, kernels, graphs and tensors."""
    used = held_by_process()
    if pid not in used:
        pytest.skip(f"the driver does not know process {pid}: it counts processes otherwise")
    return used[pid]


def held_here() -> int:
    """Return the bytes that this process holds on the first GPU."""
    return held_by(os.getpid())


def is_there(pid: int) -> bool:
    """Return True if a process runs; without `ps`, which is not on every machine."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pids: Iterable[int]) -> None:
    """Wait until no process of `pids` runs or holds memory of a GPU. Raises AssertionError if one stays."""
    deadline, gpus = time.monotonic() + END_SECONDS, range(torch.cuda.device_count())
    for pid in pids:
        while is_there(pid) or any(pid in held_by_process(gpu) for gpu in gpus):
            assert time.monotonic() < deadline, f"process {pid} still runs or holds memory of a GPU"
            time.sleep(0.05)
