"""Facts about the GPU this process computes on.

Imports torch inside `read_cuda_facts`, nothing else does here. The first visible device counts (CUDA_VISIBLE_DEVICES
chooses). What other processes hold comes from the driver's management library (NVML), where it is there. Knows nothing
of kernels: they decide what to do with these facts.
"""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

from quire.contracts.errors import ConfigError

GIB = 1024**3
NVML = "libnvidia-ml.so.1"
MAX_PROCESSES = 256
_NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE


@dataclass(frozen=True, kw_only=True)
class CudaFacts:
    """One GPU as seen by this process.

    capability      compute capability (9, 0);  num_sms  multiprocessors
    free_memory     bytes free when asked, this process's context already taken off;  total_memory  bytes
    others_memory   bytes that other processes hold; None: the driver does not tell
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    total_memory: int
    free_memory: int
    others_memory: int | None
    driver_version: str
    runtime_version: str
    torch_version: str
    device: str = "cuda"

    def __str__(self) -> str:
        versions = f"driver {self.driver_version}, CUDA {self.runtime_version}, PyTorch {self.torch_version}"
        return (f"{self.name}, sm_{self.capability[0]}{self.capability[1]}, {self.num_sms} multiprocessors, "
                f"{self.total_memory / GIB:.1f} GiB; {versions}")


@dataclass(frozen=True, kw_only=True)
class NvmlFacts:
    """What NVML says of one GPU; None and "" for what it does not."""

    driver_version: str = ""
    others_memory: int | None = None


def read_cuda_facts() -> CudaFacts:
    """Look at the GPU; creates this process's context on it. Raises ConfigError when PyTorch cannot use it."""
    import torch

    if not torch.cuda.is_available():
        why = "PyTorch is a build without CUDA" if torch.version.cuda is None else "PyTorch sees no GPU it can use"
        raise ConfigError(f"no CUDA device: {why}; use --device cpu.")
    found = torch.cuda.get_device_properties(0)
    capability = (found.major, found.minor)
    if not runs_on(capability, torch.cuda.get_arch_list()):
        raise ConfigError(f"no CUDA device: the installed PyTorch has no code for {found.name} (sm_{found.major}"
                          f"{found.minor}): install a build that has, or use --device cpu.")
    nvml = read_nvml(f"GPU-{found.uuid}")  # before there is a context of ours
    free, total = torch.cuda.mem_get_info(0)
    return CudaFacts(
        name=found.name,
        capability=capability,
        num_sms=found.multi_processor_count,
        total_memory=total,
        free_memory=free,
        others_memory=nvml.others_memory,
        driver_version=nvml.driver_version or "unknown",
        runtime_version=torch.version.cuda or "unknown",
        torch_version=torch.__version__,
    )


def runs_on(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether code for these architectures ("sm_90", "compute_90") runs on a GPU: machine code runs on the same major
    version from its minor on, PTX on every later one. An empty list says nothing and passes."""
    for name in architectures:
        kind, _, digits = name.rstrip("af").partition("_")
        if not digits.isdigit():
            return True
        built = divmod(int(digits), 10)
        if (kind == "sm" and built[0] == capability[0] and built <= capability) or (
                kind == "compute" and built <= capability):
            return True
    return not architectures


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
                ("compute_instance", ctypes.c_uint))


def read_nvml(uuid: str, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> NvmlFacts:
    """The driver's version, and what processes other than this one hold on the GPU `uuid` ("GPU-...")."""
    try:
        nvml = load(NVML)
    except OSError:
        return NvmlFacts()
    if nvml.nvmlInit_v2():
        return NvmlFacts()
    try:
        version = ctypes.create_string_buffer(80)
        known = not nvml.nvmlSystemGetDriverVersion(version, 80)
        return NvmlFacts(driver_version=version.value.decode() if known else "", others_memory=_others(nvml, uuid))
    except AttributeError:  # a library older than one of its functions
        return NvmlFacts()
    finally:
        nvml.nvmlShutdown()


def _others(nvml: ctypes.CDLL, uuid: str) -> int | None:
    handle, count = ctypes.c_void_p(), ctypes.c_uint(MAX_PROCESSES)
    if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    found = (_Process * MAX_PROCESSES)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found):
        return None
    held = [process.used for process in found[: count.value] if process.pid != os.getpid()]
    return None if _NOT_AVAILABLE in held else sum(held)
