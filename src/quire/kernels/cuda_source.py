"""Kernels in CUDA C++: compiled when they are needed, kept on disk, and launched through the driver.

    ADD = CudaSource(Path(__file__).with_name("add.cu"), {"BLOCK": 256}).kernel("add")     # once, where it is used
    ADD.launch((blocks,), (256,), [c_void_p(x.data_ptr()), c_void_p(y.data_ptr()), c_int(n)], pdl=True)

A source is one file: it includes CUDA's headers (`cuda_bf16.h`), but no other file and nothing of the C library, such
as `stdint.h`. Its kernels are `extern "C" __global__`. Macros choose variants. Inside `compiling_ahead()` a launch
compiles and runs nothing, as with Triton's kernels.

Knows no kernel.
"""

import contextlib
import ctypes
import functools
import hashlib
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quire.config.env import cache_folder
from quire.kernels import nvrtc
from quire.kernels.compile_cache import ahead_of_launch
from quire.kernels.driver import call_driver
from quire.kernels.native.build import TRAILER, intact, seal

OPTIONS = ("--std=c++17", "--no-source-include", "--generate-line-info")
ALONE = (1, 1, 1)  # a block that is a cluster by itself
# CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
SHARED_OF_DEVICE = 97
# CU_FUNC_ATTRIBUTE_...: SHARED_SIZE_BYTES, MAX_DYNAMIC_SHARED_SIZE_BYTES, NON_PORTABLE_CLUSTER_SIZE_ALLOWED
STATIC_SHARED, DYNAMIC_SHARED, LARGE_CLUSTERS = 1, 8, 14
# CU_LAUNCH_ATTRIBUTE_...: CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION
CLUSTER, OVERLAP = 4, 6
_CONTEXT_HANDLES = threading.local()  # entered: True once the thread has a context


@functools.cache
def missing() -> str:
    """Return the reason why kernels in CUDA C++ cannot run in this process, or ""."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.version.cuda is None:
        return "this PyTorch is a build without CUDA"
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return f"needs compute capability 9.0, this GPU has {major}.{minor}"
    return nvrtc.missing(f"sm_{major}{minor}a")


def missing_on_hopper() -> str:
    """Return the reason why kernels that were measured on Hopper alone do not run in this process, or ""."""
    if why := missing():
        return why
    return "" if torch.cuda.get_device_capability()[0] == 9 else "only Hopper GPUs were measured"


def runs_on_hopper(device: torch.device) -> bool:
    """Return True if a device runs kernels that were measured on Hopper alone."""
    return device.type == "cuda" and not missing_on_hopper()


class CudaSource:
    """A file in CUDA C++ with values for its macros. The object keeps what it has compiled and loaded.

    path      the `.cu` file, which lies beside the module that launches its kernels
    defines   macro -> value
    """

    def __init__(self, path: Path, defines: Mapping[str, int | str] | None = None) -> None:
        self.path, self._lock = path, threading.RLock()
        self.defines = tuple(sorted((defines or {}).items()))
        self._cubins: dict[str, bytes] = {}  # by architecture
        self._modules: dict[int, ctypes.c_void_p] = {}  # by device

    def kernel(self, name: str) -> "CudaKernel":
        """Return a kernel of this source. Compiles nothing yet."""
        return CudaKernel(self, name)

    def cubin(self, architecture: str) -> tuple[bytes, bool]:
        """Return the machine code for an architecture, such as sm_90a, and True if nothing had to be compiled for it.

        Raises `CompileError` with the compiler's log.
        """
        with self._lock:
            if architecture in self._cubins:
                return self._cubins[architecture], True
            text = self.path.read_bytes()
            options = [f"--gpu-architecture={architecture}", *OPTIONS]
            options += [f"--define-macro={name}={value}" for name, value in self.defines]
            path = cache_folder() / "cuda" / f"{self.path.stem}-{_key(text, options)}.cubin"
            if on_disk := intact(path):
                cubin = path.read_bytes()[:-TRAILER]
            else:
                folder = nvrtc.headers()
                include = [f"--include-path={folder}"] if folder else []
                cubin = nvrtc.compile_text(text, self.path.name, [*options, *include])
                _keep(path, cubin)
            self._cubins[architecture] = cubin
            return cubin, on_disk

    def load(self, device: int) -> tuple[ctypes.c_void_p, bool]:
        """Return the driver's module on a device, and True if nothing had to be compiled for it."""
        with self._lock:
            if device in self._modules:
                return self._modules[device], True
            major, minor = torch.cuda.get_device_capability(device)
            cubin, on_disk = self.cubin(f"sm_{major}{minor}a")
            _enter_context(device)
            module = ctypes.c_void_p()
            call_driver("cuModuleLoadData", ctypes.byref(module), cubin)
            self._modules[device] = module
            return module, on_disk


class CudaKernel:
    """A kernel of a source. Keep the object: the first launch on a device loads it there."""

    def __init__(self, source: CudaSource, name: str) -> None:
        self.source, self.name = source, name
        self._functions: dict[int, ctypes.c_void_p] = {}  # by device

    def launch(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: "Sequence[Any] | ctypes.Array[ctypes.c_void_p]",
        *,
        shared_bytes: int = 0,
        cluster: tuple[int, ...] = ALONE,
        pdl: bool = False,
        stream: int | None = None,
    ) -> None:
        """Launch the kernel on the current device. The driver's faults are OSErrors with the error's name.

        grid, block    one to three numbers each: blocks of the grid, threads of a block
        args           a ctypes value for each parameter, or `pointers` to them
        shared_bytes   dynamic shared memory of a block, as much as the GPU has
        cluster        blocks of a cluster, up to 16; a divisor of the grid
        pdl            True: programmatic dependent launch, see `pdl.py`
        stream         handle of a CUDA stream; None: PyTorch's current stream
        """
        device = torch.cuda.current_device()
        function = self._functions.get(device)
        if (ahead := ahead_of_launch()) is not None:
            if function is None:
                ahead.add((self, device), self.name, functools.partial(self.prepare, device))
            return
        if function is None:
            self.prepare(device)
            function = self._functions[device]
        _enter_context(device)
        if stream is None:
            stream = torch.cuda.current_stream().cuda_stream
        if not isinstance(args, ctypes.Array):
            args = pointers(args)
        call_driver("cuLaunchKernelEx", _config(grid, block, shared_bytes, cluster, pdl, stream), function, args, None)

    def prepare(self, device: int) -> bool:
        """Compile and load the kernel for a device. Returns True if nothing had to be compiled.

        The kernel may then use all shared memory of a block, and clusters of more than 8 blocks.
        """
        module, on_disk = self.source.load(device)
        _enter_context(device)
        function, number = ctypes.c_void_p(), ctypes.c_int()
        whole, static = ctypes.c_int(), ctypes.c_int()
        call_driver("cuModuleGetFunction", ctypes.byref(function), module, self.name.encode())
        call_driver("cuDeviceGet", ctypes.byref(number), device)
        call_driver("cuDeviceGetAttribute", ctypes.byref(whole), SHARED_OF_DEVICE, number)
        call_driver("cuFuncGetAttribute", ctypes.byref(static), STATIC_SHARED, function)
        call_driver("cuFuncSetAttribute", function, DYNAMIC_SHARED, whole.value - static.value)
        call_driver("cuFuncSetAttribute", function, LARGE_CLUSTERS, 1)
        self._functions[device] = function
        return on_disk


def pointers(values: Sequence[Any]) -> "ctypes.Array[ctypes.c_void_p]":
    """Return the addresses of ctypes values, as a launch takes them. The caller may change the values."""
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    addresses.values = values  # type: ignore[attr-defined]  # they live as long as their addresses
    return addresses


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: the value is a union of 64 bytes that begins with up to three numbers."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.lru_cache(4096)  # building it takes longer than the launch
def _config(
    grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, cluster: tuple[int, ...], pdl: bool, stream: int
) -> Any:
    """Return a reference to the configuration of a launch. Nobody changes it, so threads share it."""
    wanted = [(CLUSTER, _three(cluster))] if _three(cluster) != ALONE else []
    wanted += [(OVERLAP, (1, 0, 0))] if pdl else []
    attributes = (LaunchAttribute * len(wanted))()
    for attribute, (number, values) in zip(attributes, wanted, strict=True):
        attribute.id, attribute.value[:3] = number, values
    return ctypes.byref(LaunchConfig(_three(grid), _three(block), shared_bytes, stream, attributes, len(wanted)))


def _three(numbers: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _key(text: bytes, options: Sequence[str]) -> str:
    """Return the name of a compiled source: a hash of everything that it depends on."""
    return hashlib.sha256(repr((text, options, nvrtc.versions())).encode()).hexdigest()[:20]


def _keep(path: Path, cubin: bytes) -> None:
    """Write a compiled source into the cache, whole or not at all. A folder that cannot be written gets nothing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix="building-", delete=False) as file:
            name = Path(file.name)
        try:
            name.write_bytes(cubin)
            seal(name)
            name.replace(path)
        finally:
            name.unlink(missing_ok=True)


def _enter_context(device: int) -> None:
    """Give this thread PyTorch's context of the device, if it has none: a thread has none before it uses PyTorch."""
    if getattr(_CONTEXT_HANDLES, "entered", False):
        return
    context = ctypes.c_void_p()
    call_driver("cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        number = ctypes.c_int()
        call_driver("cuDeviceGet", ctypes.byref(number), device)
        call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        call_driver("cuCtxSetCurrent", context)
    _CONTEXT_HANDLES.entered = True
