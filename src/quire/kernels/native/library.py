"""The loaded library of native kernels: one per process, or the reason why there is none.

Pointers and sizes are passed as integers. The caller must check them, with `raise`: `python -O` removes `assert`.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

from quire.config.env import cache_folder
from quire.kernels.native.build import CannotBuild, build
from quire.kernels.native.levels import lacking, shipped
from quire.platforms.cpu import read_cpu_flags

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_LETTERS = {"p": _POINTER, "l": _LONG, "i": _INT, "f": _FLOAT}
# Function -> its parameters: p pointer, l long, i int, f float. The C function documents their order and meaning.
FUNCTIONS = {
    "quire_attend_rows": "ppppppppp" + "llllllllll" + "ffiii",
    "quire_attend_prompts": "pppppppp" + "llllllllll" + "ffii",
    "quire_attend_chunks": "pppppppp" + "lllllllllll" + "ffi",
    "quire_retarget_rows": "ppppp" + "llli",
    "quire_lora_shrink": "ppppp" + "lllllllll" + "iii",
    "quire_lora_expand": "pppppp" + "lllllll" + "iii",
    "quire_linear_ungate": "pp" + "lll" + "ii",
    "quire_record": "p",
    "quire_replay": "p",
    "quire_heads": "pppppppp" + "llllllll" + "fiiii",
    "quire_norm": "pppppp" + "llll" + "fiiii",
    "quire_gated": "ppp" + "llll" + "iii",
    "quire_pointwise": "pp" + "lll" + "iii",
    "quire_opened": "ppp" + "llll" + "ii",
    "quire_delta": "ppppp" + "pppp" + "ppppp" + "lllll" + "llllll" + "ff" + "iiiiii",
    "quire_mamba": "pppp" + "pppppp" + "pppppp" + "llll" + "lllll" + "fff" + "iiiii",
    "quire_shortconv": "ppppppllll" + "ii",
    "quire_chosen": "pppppppppp" + "lllllllllllllll" + "ff" + "iiii",
    "quire_index": "ppppppppppp" + "llllllllllll" + "iii",
    "quire_sum_bytes": "pppp" + "ll",
    "quire_pack_bf16": "ppllii",
    "quire_rows_bf16": "pppllli",
    "quire_linear_bf16": "ppppp" + "llll" + "iii",
    "quire_linear_panels": "ppppppppppp" + "lll" + "iiiiiiiiii",
    "quire_linear_rows": "pppppp" + "llll" + "iiiiiif",
    "quire_linear_pack": "pp" + "lll" + "iii",
    "quire_linear_unpack_rows": "ppp" + "llll" + "iii",
}


@functools.cache
def library() -> ctypes.CDLL | str:
    """Return the loaded library of native kernels, or the reason (text) why there is none.

    The library is compiled at the first use on this machine, unless the installation carries one that is as fast.
    """
    try:
        return _load(cache_folder() / "kernels")
    except CannotBuild as reason:
        return str(reason)


def missing(found: Callable[[], ctypes.CDLL | str] = library) -> str:
    """Return the reason why native kernels cannot run here, or "". found: returns the library; tests replace it."""
    library = found()
    return library if isinstance(library, str) else ""


@functools.cache
def missing_amx(found: Callable[[], ctypes.CDLL | str] = library) -> str:
    """Return the reason why the AMX kernels (bfloat16) cannot run here, or "". found: as in `missing`."""
    lacking = [flag for flag in ("amx_tile", "amx_bf16", "avx512_bf16") if flag not in read_cpu_flags()]
    if lacking:
        return f"this CPU has no {lacking[0]}"
    library = found()
    if isinstance(library, str):
        return library
    if not hasattr(library, "quire_linear_bf16"):
        return "the compiled kernels are without AMX: install a C compiler that knows it (gcc 11, clang 12, or newer)"
    return "the system does not let this process use AMX" if library.quire_enable_amx() else ""


def loaded() -> ctypes.CDLL:
    """Return the loaded library of native kernels. Call it only if `missing` returned ""."""
    found = library()
    assert not isinstance(found, str), found
    return found


def _open(folder: Path) -> ctypes.CDLL:
    """Load the library that uses most of this CPU: the shipped one if it lacks nothing, else one compiled here.

    A shipped library that lacks something stands in where nothing can be compiled. A shipped library may need a newer C
    library than this system's: then it is not loaded.
    """
    flags = read_cpu_flags()
    path = shipped(flags)
    if path is not None and not lacking(flags):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path))
    try:
        return _open_compiled(folder, flags)
    except CannotBuild:
        if path is not None:
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(path))
        raise


def _open_compiled(folder: Path, flags: frozenset[str]) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(build(folder, flags)))
    except OSError:  # compiled on another system that shares this cache: compile it again
        try:
            return ctypes.CDLL(str(build(folder, flags, fresh=True)))
        except OSError as error:
            raise CannotBuild(
                f"the compiled kernels cannot be loaded ({error}): set QUIRE_CACHE_DIR to a folder from "
                "which programs may run"
            ) from None


def _load(folder: Path) -> ctypes.CDLL:
    found = _open(folder)
    for name, letters in FUNCTIONS.items():
        if hasattr(found, name):  # without AMX there are no linears
            function = getattr(found, name)
            function.argtypes, function.restype = [_LETTERS[letter] for letter in letters], None
    try:
        found.quire_keep_memory()
        found.quire_recording_bytes.argtypes, found.quire_recording_bytes.restype = [_LONG], _LONG
    except AttributeError:
        raise CannotBuild(
            "the compiled kernels lack a function, which the compiler left out: install a newer C compiler"
        ) from None
    if hasattr(found, "quire_enable_amx"):
        found.quire_enable_amx()  # also in a process that asks for no kernel: a core chooses those of its ranks
    return found
