"""Calls of functions of NVIDIA's driver library."""

import ctypes
from functools import lru_cache
from typing import Any

LIBRARY = "libcuda.so.1"


def call_driver(name: str, *values: Any) -> None:
    """Call a function of the driver. Raises OSError with its name and the name of the error.

    The call that begins a copy keeps Python's lock: thousands of them would wait for it behind busy threads.
    """
    if code := getattr(_driver(ctypes.PyDLL if name == "cuMemcpyAsync" else ctypes.CDLL), name)(*values):
        words = ctypes.c_char_p()
        _driver(ctypes.CDLL).cuGetErrorName(code, ctypes.byref(words))
        raise OSError(f"{name}: {words.value.decode() if words.value else code}")


@lru_cache
def _driver(kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    return kind(LIBRARY)
