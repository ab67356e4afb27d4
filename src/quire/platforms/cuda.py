"""Facts about the GPU that this process computes on: the first visible one (CUDA_VISIBLE_DEVICES chooses).

Only `read_cuda_facts` imports torch. The memory of other processes comes from the driver's management library (NVML),
if it is installed. Knows nothing of kernels.
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
    """Facts about the GPU, as seen by this process.

    capability      compute capability, (major, minor)
    num_sms         streaming multiprocessors (SMs)
    total_memory    bytes
    free_memory     bytes free at the time of reading, after this process's CUDA context was created
    others_memory   bytes of GPU memory that other processes hold; None: the driver does not tell
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

    def __str__(self) -> str:
        versions = f"driver {self.driver_version}, CUDA {self.runtime_version}, PyTorch {self.torch_version}"
        return (
            f"{self.name}, sm_{self.capability[0]}{self.capability[1]}, {self.num_sms} multiprocessors, "
            f"{self.total_memory / GIB:.1f} GiB; {versions}"
        )


@dataclass(frozen=True, kw_only=True)
class NvmlFacts:
    """Driver version and memory of other processes on a GPU, as NVML (NVIDIA's library) tells; "" or None: unknown."""

    driver_version: str = ""
    others_memory: int | None = None


def read_cuda_facts() -> CudaFacts:
    """Return name, size, memory and versions of the current GPU. Creates this process's CUDA context on it.

    Raises `ConfigError` if PyTorch cannot use the GPU.
    """
    import torch

    if not torch.cuda.is_available():
        why = "PyTorch is a build without CUDA" if torch.version.cuda is None else "PyTorch finds no usable GPU"
        raise ConfigError(f"no CUDA device: {why}; use --device cpu.")
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = (found.major, found.minor)
    if not runs_on(capability, torch.cuda.get_arch_list()):
        raise ConfigError(
            f"no CUDA device: the installed PyTorch has no code for {found.name} (sm_{found.major}"
            f"{found.minor}): install a build for this GPU, or use --device cpu."
        )
    nvml = read_nvml(f"GPU-{found.uuid}")  # before this process has a context
    free, total = torch.cuda.mem_get_info()
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
    """Return True if code for one of these architectures ("sm_90", "compute_90") runs on a GPU of `capability`.

    Machine code ("sm") runs on GPUs of the same major version with the same or a higher minor. PTX ("compute") runs on
    every later GPU. An empty list, or a name that cannot be read, returns True.
    """
    for name in architectures:
        kind, _, digits = name.rstrip("af").partition("_")
        if not digits.isdigit():
            return True
        built = divmod(int(digits), 10)
        if (kind == "sm" and built[0] == capability[0] and built <= capability) or (
            kind == "compute" and built <= capability
        ):
            return True
    return not architectures


class _Process(ctypes.Structure):
    """NVML's nvmlProcessInfo_t, as nvmlDeviceGetComputeRunningProcesses_v3 fills it."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def read_nvml(uuid: str, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> NvmlFacts:
    """Ask NVML for the driver's version, and for the memory that other processes hold on the GPU `uuid` ("GPU-...")."""
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
