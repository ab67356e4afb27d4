"""The kernel of products of one row on a CPU, for a GPU with few multiprocessors."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.kernels.one_row import product
from quire.kernels.one_row.product import SOURCE, Form, Tiling

from .cuda_emulated import EmulatedKernel

MULTIPROCESSORS = 4
SHARED = 227 * 1024  # bytes that a block of Hopper can have
COMPILER = bool(shutil.which("g++"))


def emulate(patch: pytest.MonkeyPatch, folder: Path, tiling: Tiling) -> Callable[[Form], EmulatedKernel]:
    """Let products of one row run on the CPU. Return a function that returns the kernel of a form."""
    of_source = product.kernel_of

    @functools.cache
    def kernel_of(form: Form) -> EmulatedKernel:
        (own := folder / "-".join(map(str, map(int, form)))).mkdir()
        return EmulatedKernel(SOURCE, dict(of_source(form, tiling).source.defines), "one_row", own)

    patch.setattr(product, "kernel_of", lambda form, _: kernel_of(form))
    patch.setattr(product, "multiprocessors", lambda: MULTIPROCESSORS)
    patch.setattr(product, "shared_memory", lambda: SHARED)
    patch.setattr(product, "tiling_of", lambda _: tiling)
    patch.setattr(product, "runs_on_hopper", lambda _: True)
    return kernel_of
