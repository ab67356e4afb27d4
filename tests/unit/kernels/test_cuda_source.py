"""Sources in CUDA C++: their cache, their errors, and what a launch asks of the driver. Needs no GPU."""

import ctypes
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.kernels import compile_cache, cuda_source, nvrtc
from quire.kernels.cuda_source import CudaSource, LaunchAttribute, LaunchConfig, pointers
from quire.kernels.nvrtc import CompileError

ADD = 'extern "C" __global__ void add(float *x, int n) { if (threadIdx.x < n) x[threadIdx.x] += VALUE; }\n'
DEVICE, STREAM, SHARED, STATIC = 0, 0x7F00AABBCCDD, 232_448, 1024


class Compiler:
    """A stand-in for NVRTC: the cubin of a text is the text with its options. A text with "wrong" has an error."""

    def __init__(self) -> None:
        self.compiled: list[tuple[bytes, ...]] = []
        self.minor, self.left = 0, 0
        self.text = self.made = b""
        self.nvrtcGetErrorString = lambda code: b"NVRTC_ERROR_OF_%d" % code

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 13, self.minor
        return 0

    def nvrtcCreateProgram(self, program: Any, text: bytes, *_: Any) -> int:
        self.text, self.left = text, self.left + 1
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        self.left -= 1
        return 0

    def nvrtcCompileProgram(self, program: Any, number: int, options: Any) -> int:
        self.compiled.append(tuple(options))
        self.made = b"line 1: error: no" if b"wrong" in self.text else b"".join([self.text, *options])
        return 6 if b"wrong" in self.text else 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(self.made)
        return 0

    def nvrtcGetCUBIN(self, program: Any, held: Any) -> int:
        held[: len(self.made)] = self.made
        return 0

    nvrtcGetProgramLogSize, nvrtcGetProgramLog = nvrtcGetCUBINSize, nvrtcGetCUBIN


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler()
    monkeypatch.setattr(nvrtc, "_library", lambda: found)
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    return tmp_path / "cuda"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "add.cu"
    path.write_text(ADD)
    return path


def test_a_source_is_compiled_once_for_all_processes(path: Path, cache: Path, compiler: Compiler) -> None:
    cubin, on_disk = CudaSource(path, {"VALUE": 3}).cubin("sm_90a")
    assert not on_disk and b"--gpu-architecture=sm_90a" in cubin and b"--define-macro=VALUE=3" in cubin
    assert CudaSource(path, {"VALUE": 3}).cubin("sm_90a") == (cubin, True)
    assert len(compiler.compiled) == 1 and compiler.left == 0
    assert [file.name.split("-")[0] for file in cache.iterdir()] == ["add"], "nothing is left but the source"


def version(path: Path, compiler: Compiler) -> None:
    compiler.minor = 1


def text(path: Path, compiler: Compiler) -> None:
    path.write_text(ADD + "//")


@pytest.mark.parametrize("change", [version, text])
def test_what_a_compiled_source_depends_on(
    path: Path, compiler: Compiler, change: Callable[[Path, Compiler], None]
) -> None:
    CudaSource(path, {"VALUE": 3}).cubin("sm_90a")
    change(path, compiler)
    assert not CudaSource(path, {"VALUE": 3}).cubin("sm_90a")[1]
    assert not CudaSource(path, {"VALUE": 4}).cubin("sm_90a")[1]
    assert not CudaSource(path, {"VALUE": 3}).cubin("sm_100a")[1]


@pytest.mark.parametrize("length", [0, 10, -1])
def test_an_incomplete_file_is_compiled_again(path: Path, cache: Path, compiler: Compiler, length: int) -> None:
    cubin, _ = CudaSource(path).cubin("sm_90a")
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:length])
    assert CudaSource(path).cubin("sm_90a") == (cubin, False)
    assert CudaSource(path).cubin("sm_90a") == (cubin, True)


def test_a_folder_that_cannot_be_written_costs_the_cache_alone(path: Path, cache: Path, compiler: Compiler) -> None:
    cache.write_text("a file")
    assert not CudaSource(path).cubin("sm_90a")[1]
    assert not CudaSource(path).cubin("sm_90a")[1]


def test_an_error_has_the_log(path: Path, cache: Path, compiler: Compiler) -> None:
    path.write_text("wrong")
    with pytest.raises(CompileError, match="^line 1: error: no$"):
        CudaSource(path).cubin("sm_90a")
    assert not cache.exists() and compiler.left == 0


def test_structures_are_those_of_the_driver() -> None:
    """Sizes and places as a C compiler has them for cuda.h, of CUDA 12.8 and of 13.0."""
    config = [ctypes.sizeof(LaunchConfig), *(getattr(LaunchConfig, name).offset for name, _ in LaunchConfig._fields_)]
    assert config == [56, 0, 12, 24, 32, 40, 48]
    assert [ctypes.sizeof(LaunchAttribute), LaunchAttribute.value.offset] == [72, 8]


class Driver:
    """A stand-in for the driver. It keeps what launches are given; arguments are numbers of 4 bytes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.context = 1
        self.launches: list[dict[str, Any]] = []
        self.limits: dict[int, int] = {}
        self.before_launch: Callable[[], object] = lambda: None

    def __call__(self, name: str, *values: Any) -> None:
        self.calls.append(name)
        made = {"cuCtxGetCurrent": self.context, "cuModuleLoadData": 2, "cuModuleGetFunction": 3, "cuDeviceGet": DEVICE}
        made |= {"cuDeviceGetAttribute": SHARED, "cuFuncGetAttribute": STATIC}
        if name in made:
            values[0]._obj.value = made[name]
        if name == "cuFuncSetAttribute":
            self.limits[values[1]] = values[2]
        if name == "cuLaunchKernelEx":
            self.before_launch()
            config, function, args = values[0]._obj, values[1], values[2]
            found = {name: getattr(config, name) for name, _ in LaunchConfig._fields_}
            found = {name: list(value) if isinstance(value, ctypes.Array) else value for name, value in found.items()}
            some = [config.attributes[place] for place in range(config.num_attributes)]
            found["attributes"] = [(one.id, *one.value[:3]) for one in some]
            self.launches.append(found | {"args": [ctypes.c_int.from_address(at).value for at in args]})
            assert function.value == 3


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> Driver:
    found = Driver()
    monkeypatch.setattr(cuda_source, "call_driver", found)
    monkeypatch.setattr(cuda_source, "_CONTEXT_HANDLES", threading.local())
    cuda_source._CONTEXT_HANDLES.entered = True  # this thread, whatever test runs before
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    return found


def test_a_launch(path: Path, driver: Driver) -> None:
    kernel = CudaSource(path).kernel("add")
    kernel.launch((4, 2), (128,), [ctypes.c_int(7), ctypes.c_int(8)])
    assert driver.launches == [
        {
            "grid": [4, 2, 1],
            "block": [128, 1, 1],
            "shared_bytes": 0,
            "stream": STREAM,
            "attributes": [],
            "num_attributes": 0,
            "args": [7, 8],
        }
    ]
    assert driver.limits == {8: SHARED - STATIC, 14: 1}, "all shared memory of a block, and clusters of 16"
    calls = len(driver.calls)
    kernel.launch((4, 2), (128,), [ctypes.c_int(7)], shared_bytes=200_000, cluster=(4, 2), pdl=True, stream=5)
    assert len(driver.calls) == calls + 1, "it is loaded, and its limits are set"
    wanted = {"shared_bytes": 200_000, "stream": 5, "attributes": [(4, 4, 2, 1), (6, 1, 0, 0)]}
    assert driver.launches[1].items() >= wanted.items()


def test_arguments_live_until_their_launch(path: Path, driver: Driver) -> None:
    """Python frees what only a call holds as soon as the call forgets it."""

    class Values(list[Any]):
        """A list that a weak reference can name."""

    made = [Values([ctypes.c_int(7)]), Values([ctypes.c_int(8)])]
    held = [weakref.ref(one) for one in made]
    alive: list[bool] = []
    driver.before_launch = lambda: alive.append(held.pop()() is not None)
    kernel, prepared = CudaSource(path).kernel("add"), pointers(made.pop(0))
    kernel.launch((1,), (1,), made.pop())
    kernel.launch((1,), (1,), prepared)
    assert alive == [True, True]


def test_a_prepared_launch_takes_the_values_of_now(path: Path, driver: Driver) -> None:
    number = ctypes.c_int(7)
    kernel, prepared = CudaSource(path).kernel("add"), pointers([number])
    for number.value in (7, 8):
        kernel.launch((1,), (1,), prepared)
    assert [one["args"] for one in driver.launches] == [[7], [8]]


def test_a_thread_without_a_context_gets_that_of_pytorch(path: Path, driver: Driver) -> None:
    kernel = CudaSource(path).kernel("add")
    kernel.launch((1,), (1,), [])
    driver.calls.clear()
    driver.context = 0
    with ThreadPoolExecutor(1) as threads:
        for _ in range(2):
            threads.submit(kernel.launch, (1,), (1,), []).result()
    entered = ["cuCtxGetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert driver.calls == [*entered, "cuLaunchKernelEx", "cuLaunchKernelEx"]


@pytest.fixture
def not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(compile_cache, "INTERPRETED", False)


@pytest.mark.usefixtures("not_interpreted")
def test_compiling_ahead_launches_nothing(path: Path, driver: Driver, tmp_path: Path) -> None:
    (wrong := tmp_path / "wrong.cu").write_text("wrong")
    kernels = [CudaSource(path, {"VALUE": value}).kernel("add") for value in (1, 2)]
    with compile_cache.compiling_ahead() as ahead:
        for kernel in [*kernels, *kernels, CudaSource(wrong).kernel("fails")]:
            kernel.launch((1,), (1,), [])
    report = ahead.report()
    assert (report.num_kernels, report.num_compiled) == (3, 2)
    assert report.failed == (("fails", "line 1: error: no"),)
    calls = len(driver.calls)
    for kernel in kernels:
        kernel.launch((1,), (1,), [])
    assert driver.calls[calls:] == ["cuLaunchKernelEx"] * 2 and len(driver.launches) == 2, "they were loaded, too"
    with compile_cache.compiling_ahead() as again:
        CudaSource(path, {"VALUE": 1}).kernel("add").launch((1,), (1,), [])
        kernels[1].launch((1,), (1,), [])
    assert (again.report().num_kernels, again.report().num_compiled) == (1, 0)


def test_where_cuda_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = cuda_source.missing.__wrapped__
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert missing() == "there is no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert missing() == "this PyTorch is a build without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert missing() == "needs compute capability 9.0, this GPU has 8.9"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(nvrtc, "missing", nvrtc.missing.__wrapped__)
    monkeypatch.setattr(nvrtc, "_library", nvrtc._library.__wrapped__)
    assert missing().startswith("NVRTC, which comes with PyTorch for CUDA, was not found (libnvrtc.so.99: ")


def test_a_compiler_that_lacks_a_part(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "headers", lambda: Path("/"))
    assert nvrtc.missing.__wrapped__() == "" and compiler.left == 0
    monkeypatch.setattr(compiler, "nvrtcCompileProgram", lambda *_: 7)
    compiler.made = b"nvrtc: error: failed to open a part.\n  Make sure that it is installed."
    assert nvrtc.missing.__wrapped__() == "NVRTC compiles nothing for sm_90a (nvrtc: error: failed to open a part.)"


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
def test_a_gpu_newer_than_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are Triton's, which has another compiler: a kernel that cannot be compiled would end the start."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or f"{nvrtc.UNKNOWN}.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (99, 1))
    assert cuda_source.missing.__wrapped__().startswith(
        "NVRTC compiles nothing for sm_991a (nvrtc: error: invalid value"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert cuda_source.missing.__wrapped__() == ""


@pytest.mark.parametrize("place", ["cu99/lib", "cuda_nvrtc/lib"])
def test_nvrtc_is_that_of_nvidia_s_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    folder = tmp_path / "nvidia" / place
    folder.mkdir(parents=True)
    for name in ("libnvrtc.so.99", "libnvrtc.so.12", "libnvrtc-builtins.so.99.1"):
        (folder / name).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "other"), str(tmp_path / "nvidia")])
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: spec if name == "nvidia" else None)
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name: loaded.append(Path(name).name))
    loaded: list[str] = []
    nvrtc._library.__wrapped__()
    assert loaded == ["libnvrtc-builtins.so.99.1", "libnvrtc.so.99"], "the first is found by the second"


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
def test_the_real_compiler(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n" + ADD)
    cubin, on_disk = CudaSource(path, {"VALUE": "2.5f"}).cubin("sm_90a")
    assert cubin.startswith(b"\x7fELF") and b"add" in cubin and not on_disk
    with pytest.raises(CompileError) as raised:
        CudaSource(path).cubin("sm_90a")
    assert compile_cache.reason(raised.value) == 'add.cu(3): error: identifier "VALUE" is undefined'
    path.write_text('#include "other.cuh"\n')
    (path.parent / "other.cuh").touch()
    monkeypatch.chdir(path.parent)
    with pytest.raises(CompileError) as raised:
        CudaSource(path).cubin("sm_90a")
    assert "catastrophic error: cannot open source file" in compile_cache.reason(raised.value)
