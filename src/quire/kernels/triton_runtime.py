"""Triton, where it is installed: the one place that imports it, so that every kernel module can be imported anywhere.

Without Triton `jit` gives functions that cannot be called, and `missing` says why no Triton kernel can run.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    jit = triton.jit
    INTERPRETED = bool(triton.knobs.runtime.interpret)
else:
    triton = tl = None
    INTERPRETED = False

    def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
        """What stands for a kernel where there is none."""
        return function or jit


@functools.cache
def missing() -> str:
    """Why Triton kernels cannot run in this process, or ""."""
    if triton is None:
        return "Triton is not installed"
    if INTERPRETED:
        return ""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return "" if major >= 8 else f"needs compute capability 8.0, this GPU has {major}.{minor}"
