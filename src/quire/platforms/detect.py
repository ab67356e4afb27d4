"""Choose the device for `--device`: asks the NVIDIA driver directly, so that a machine without a GPU imports no torch.

Knows the driver's C interface (cuInit, cuDeviceGetCount, cuDeviceGetAttribute) and the file in which an installed
PyTorch names its CUDA version. Asking creates no context and takes no device memory. But a process that has asked
cannot fork and use CUDA in the child, so only the process that computes asks.
"""

import ctypes
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel

LIBRARY = "libcuda.so.1"
MIN_CAPABILITY = (8, 0)  # the Triton kernels need it
MAJOR, MINOR = 75, 76  # CUdevice_attribute: the compute capability
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"](\d+\.\d+)['\"]", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class DriverProbe:
    """The driver's answer about the first GPU that this process may use.

    capability   compute capability, (major, minor)
    memory       bytes of GPU memory
    count        number of GPUs that this process may use
    missing      the reason why there is no usable GPU, or ""
    """

    capability: tuple[int, int] = (0, 0)
    memory: int = 0
    count: int = 0
    missing: str = ""


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The chosen device, "cpu" or "cuda", and the reason."""

    device: str
    reason: str

    def __str__(self) -> str:
        return f"{self.device} ({self.reason})"


def probe_driver(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> DriverProbe:
    """Ask the NVIDIA driver about the first GPU. Takes about 0.1 s; without a driver, no time."""
    try:
        driver = load(LIBRARY)
    except OSError:
        return DriverProbe(missing="there is no NVIDIA driver")
    code = driver.cuInit(0)
    if code:
        named = "the driver sees no GPU" if code == _NO_DEVICE else f"the driver fails to start (CUDA error {code})"
        return DriverProbe(missing=named)
    count, major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return DriverProbe(missing="the driver sees no GPU")
    driver.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, 0)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, 0)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), 0)
    return DriverProbe(capability=(major.value, minor.value), memory=memory.value, count=count.value)


def check_gpus(parallel: Parallel, probe: Callable[[], DriverProbe] = probe_driver, *, here: int | None = None) -> None:
    """Raise `ConfigError` when this host's ranks of `parallel` need more GPUs, one each, than this process may use.

    here   number of ranks of this host; None: all
    """
    needed = parallel.size if here is None else here
    if parallel.size == 1 or needed <= (count := probe().count):
        return
    if needed < parallel.size:
        raise ConfigError(
            f"{parallel} needs {needed} GPUs on this host, and this process sees {count}: "
            "use more hosts (--nnodes), make more GPUs visible (CUDA_VISIBLE_DEVICES), or use --device "
            "cpu."
        )
    fewer = max(size for size in range(1, count + 1) if parallel.tp % size == 0) if count else 1
    words = f"-tp {fewer}" if fewer > 1 else "one device (no -tp and no -pp)"
    raise ConfigError(
        f"{parallel} needs {parallel.size} GPUs, and this process sees {count}: use {words}, make more "
        "GPUs visible (CUDA_VISIBLE_DEVICES), or use --device cpu."
    )


def torch_cuda_version() -> str:
    """Return the CUDA version of the installed PyTorch, "" for a build without CUDA. Reads a file, imports nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        found = _TORCH_CUDA.search((Path(spec.origin).parent / "version.py").read_text())
    except OSError:
        return ""
    return found.group(1) if found else ""


def resolve_device(
    asked: str, probe: Callable[[], DriverProbe] = probe_driver, built_for: Callable[[], str] = torch_cuda_version
) -> DevicePlan:
    """Choose the device for --device `asked`: "auto", "cpu" or "cuda".

    "auto" is the GPU if Quire's Triton kernels run on it, else the CPU. "cuda" raises `ConfigError` without a usable
    GPU; a GPU too old for the Triton kernels then runs PyTorch's operations.
    """
    if asked == "cpu":
        return DevicePlan(device="cpu", reason="as asked")
    found = probe()
    missing = found.missing or ("" if built_for() else "the installed PyTorch is a build without CUDA")
    if asked == "auto":
        if not missing and found.capability < MIN_CAPABILITY:
            has, least = (".".join(map(str, version)) for version in (found.capability, MIN_CAPABILITY))
            missing = f"the GPU's compute capability {has} is below {least}"
        return DevicePlan(device="cpu" if missing else "cuda", reason=missing or "there is a GPU")
    if missing:
        raise ConfigError(f"no CUDA device: {missing}; use --device cpu.")
    return DevicePlan(device="cuda", reason="as asked")
