"""NVRTC, NVIDIA's compiler of CUDA C++ at run time: from a text to machine code (a cubin). It needs no GPU.

The library is the one that PyTorch brings along, of PyTorch's version of CUDA. CUDA's headers come with Triton.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from quire.kernels.triton_runtime import triton  # type: ignore[attr-defined,unused-ignore]

OLDEST = (12, 4)  # knows __maxnreg__
UNKNOWN = "13"  # CUDA's major version where PyTorch is a build without CUDA: tests compile there, too


class CompileError(Exception):
    """Error: NVRTC cannot compile a source. The message is NVRTC's log."""


@functools.cache
def missing(architecture: str = "sm_90a") -> str:
    """Return the reason why CUDA C++ cannot be compiled for an architecture in this process, or "". Compiles an empty
    text (0.1 s): NVRTC may be older than a GPU, and opens a part of it late, without which it is of no use."""
    try:
        _library()
    except OSError as error:
        return f"NVRTC, which comes with PyTorch for CUDA, was not found ({error})"
    if (version := versions()[:2]) < OLDEST:
        return "NVRTC {}.{} or later is needed, this one is {}.{}".format(*OLDEST, *version)
    try:
        compile_text(b"", "nothing.cu", [f"--gpu-architecture={architecture}"])
    except CompileError as error:
        return f"NVRTC compiles nothing for {architecture} ({str(error).splitlines()[0]})"
    return "" if headers() else "CUDA's headers, which come with Triton, were not found"


@functools.cache
def headers() -> Path | None:
    """Return the folder with `cuda_bf16.h` and CUDA's other headers; None where Triton has none."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "include" if triton is not None else None
    return folder if folder and (folder / "cuda_bf16.h").exists() else None


def versions() -> tuple[int | str, ...]:
    """Return the versions on which a compiled source depends: NVRTC's two numbers, and Triton's for the headers."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value, triton.__version__ if triton is not None else ""


def compile_text(text: bytes, name: str, options: Sequence[str]) -> bytes:
    """Return the cubin of a text in CUDA C++. Raises `CompileError` with NVRTC's log.

    name      name of the text in the log
    options   NVRTC's options, the architecture among them: a real one, such as sm_90a
    """
    library, program = _library(), ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), 0, None, None))
    try:
        words = [option.encode() for option in options]
        if code := library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words)):
            log = _result(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise CompileError(log.rstrip(b"\0").decode(errors="replace").strip() or _error_name(code))
        return _result(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _library() -> Any:
    """Return NVRTC. Raises OSError if it is not found."""
    major = (torch.version.cuda or UNKNOWN).split(".")[0]
    name = f"libnvrtc.so.{major}"
    for folder in _folders(major):
        if (folder / name).exists():
            # NVRTC looks for this part by its name alone, which finds it once it is loaded.
            for part in folder.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(part))
            return ctypes.CDLL(str(folder / name))
    return ctypes.CDLL(name)


def _folders(major: str) -> Iterator[Path]:
    """Yield the folders in which NVIDIA's packages for Python have NVRTC, since CUDA 13 and before."""
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        yield Path(folder, f"cu{major}", "lib")
        yield Path(folder, "cuda_nvrtc", "lib")


def _result(measure: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    """Return the bytes of a program that `measure` counts and `read` copies."""
    size = ctypes.c_size_t()
    _check(measure(program, ctypes.byref(size)))
    held = ctypes.create_string_buffer(size.value)
    _check(read(program, held))
    return held.raw


def _check(code: int) -> None:
    if code:
        raise CompileError(_error_name(code))


def _error_name(code: int) -> str:
    ask = _library().nvrtcGetErrorString
    ask.restype = ctypes.c_char_p
    return (ask(code) or str(code).encode()).decode()
