"""Kernels that have compiled and passed the checks of this folder: they are not compiled again, which takes minutes.

A kernel is known by a hash of all that its machine code depends on: Triton's hash of its source with the functions that
it calls, its constants, the types of its arguments, the options, and the versions of Triton and ptxas. A change of any
of these makes another hash, and the kernel is compiled and checked. So are all kernels of a module `compile_....py`
whose text has changed, or that of `compiling.py`: their checks are others.

`tools/record_kernels.py` compiles all of them and writes `known_kernels.json`. With --full no kernel is known.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from ..support.full import FULL

HERE = Path(__file__).parent
RECORD = HERE / "known_kernels.json"
SWITCH = "RECORD_KERNELS"  # a file for the hashes of kernels; with it, all are compiled


def key_of(src: Any, target: GPUTarget, options: dict[str, Any]) -> str:
    """Return the hash of a kernel with its constants, types and options, as Triton is about to compile it."""
    backend = make_backend(target)
    parts = src.hash(), backend.hash(), backend.parse_options(options | src.parse_options()).hash(), triton.__version__
    return hashlib.sha256("-".join(parts).encode()).hexdigest()[:16]


def checks_of(module: str) -> str:
    """Return the hash of a module's launches and checks."""
    texts = (HERE / f"{name}.py" for name in (module, "compiling"))
    return hashlib.sha256(b"".join(text.read_bytes() for text in texts)).hexdigest()[:16]


def known(module: str) -> frozenset[str]:
    """Return the hashes of the kernels that a module need not compile."""
    if FULL or SWITCH in os.environ:
        return frozenset()
    found = json.loads(RECORD.read_text()).get(module, {})
    return frozenset(found["kernels"].split()) if found.get("checks") == checks_of(module) else frozenset()


def record(compiled: dict[str, set[str]]) -> None:
    """Write the hashes of the kernels of all modules."""
    made = {
        module: {"checks": checks_of(module), "kernels": " ".join(sorted(keys))}
        for module, keys in sorted(compiled.items())
    }
    RECORD.write_text(json.dumps(made, indent=1) + "\n")
