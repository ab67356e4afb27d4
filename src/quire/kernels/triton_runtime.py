"""The only import of Triton, which may be missing: every kernel module can be imported anywhere.

Without Triton `jit` returns functions that cannot be launched, and `missing` returns the reason.
"""

import functools
import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire.config.env import c_compiler

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    jit = triton.jit
    INTERPRETED = bool(triton.knobs.runtime.interpret)
else:
    triton = tl = None
    INTERPRETED = False

    def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
        """Replace `triton.jit` where Triton is not installed: return the function, which cannot be launched."""
        return function or jit


GLUON_VERSIONS = ("3.6.",)  # Triton versions whose Gluon is tested: this lower level of Triton is experimental
if triton is not None and triton.__version__.startswith(GLUON_VERSIONS) and not INTERPRETED:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia import hopper as descriptors

    gluon_jit = gluon.jit
else:
    gl = hopper = descriptors = None

    def gluon_jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
        """Replace `gluon.jit` where Gluon cannot run: return the function, which cannot be launched."""
        return function or gluon_jit


@functools.cache
def missing() -> str:
    """Return the reason why Triton kernels cannot run in this process, or ""."""
    if triton is None:
        return "Triton is not installed"
    if INTERPRETED:
        return ""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"needs compute capability 8.0, this GPU has {major}.{minor}"
    names = (named,) if (named := c_compiler()) else ("gcc", "clang")  # Triton compiles a launcher for each kernel
    if not any(map(shutil.which, names)):
        return f"Triton needs a C compiler ({' or '.join(names)}): install one, or name it in CC"
    if not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists():
        return "Triton needs Python's headers (Python.h): install python3-dev"
    return ""


def missing_eight_bits() -> str:
    """Return the reason why Triton kernels cannot convert 8-bit floating-point numbers in this process, or ""."""
    if (why := missing()) or INTERPRETED:
        return why
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) >= (8, 9):
        return ""
    return f"8-bit numbers need compute capability 8.9, this GPU has {major}.{minor}"


def missing_hopper() -> str:
    """Return the reason why Hopper's Gluon kernels cannot run in this process, or "". Gluon has no interpreter."""
    if why := missing():
        return why
    if gl is None:
        return f"its kernels are tried with Triton {', '.join(GLUON_VERSIONS)}x only"
    major, minor = torch.cuda.get_device_capability()
    return "" if major == 9 else f"needs compute capability 9.0, this GPU has {major}.{minor}"
