"""Compiled kernels of a GPU: Triton's cache on disk, and parallel compilation ahead of need.

Triton's cache key holds source, signature, options, compiler and GPU, so one folder serves any number of versions and
machines. Three things are slow the first time: the compiler (0.2 to 2 s a kernel, mostly without Python's lock), the
small C program that passes a kernel's arguments (a C compiler, 0.3 s for each signature), and loading the kernel onto
the GPU. Threads do all three.

    with compiling_ahead() as ahead:
        model(...)
    print(ahead.report())

Inside the block every launch compiles its kernel and runs nothing. So the step compiles exactly the kernel variants
that its arguments need, and its outputs are garbage. Kernels that are not Triton's ask `ahead_of_launch` before they
launch.

Knows Triton's runtime as of 3.6 (`JITFunction.run`, its asynchronous mode); knows no kernel.
"""

import functools
import os
import re
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from quire.config.env import triton_cache_folder
from quire.kernels.triton_runtime import INTERPRETED, triton  # type: ignore[attr-defined,unused-ignore]

MAX_THREADS = 32


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """Counts of a parallel compilation.

    num_kernels    number of different kernels that were launched
    num_compiled   number of kernels that were compiled, because the cache on disk did not have them
    seconds        time of the whole compilation
    failed         (kernel, error, see `reason`) of each kernel that could not be compiled
    """

    num_kernels: int
    num_compiled: int
    seconds: float
    failed: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        text = f"{self.num_kernels} kernels in {self.seconds:.1f} s, {self.num_compiled} of them compiled"
        return text + "".join(f"; {name} failed: {why}" for name, why in self.failed)


def use_cache_folder(folder: Path | None = None) -> tuple[Path, str]:
    """Make Triton keep compiled kernels in `folder` (None: Quire's folder, see `config/env.py`).

    Call it once, before the first launch.

    Returns the folder in use and a note for the user. If `folder` cannot be written, a temporary folder is used and the
    note says so; else the note is "".
    """
    wanted = triton_cache_folder() if folder is None else folder
    note = ""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        usable = os.access(wanted, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if not usable:
        instead = Path(tempfile.mkdtemp(prefix="quire-triton-"))
        note = f"{wanted} cannot be written: kernels are compiled anew at every start; set QUIRE_CACHE_DIR."
        wanted = instead
    if triton is not None:
        triton.knobs.cache.dir = str(wanted)
    return wanted, note


@dataclass(kw_only=True)
class Ahead:
    """Kernels that `compiling_ahead` compiles. `report` returns their counts."""

    threads: ThreadPoolExecutor
    began: float = field(default_factory=perf_counter)
    seconds: float = 0.0
    launching: str = ""
    kernels: list[tuple[str, "Future[Any]"]] = field(default_factory=list)
    on_disk: list[bool] = field(default_factory=list)
    added: set[Hashable] = field(default_factory=set)

    def add(self, key: Hashable, name: str, build: Callable[[], bool]) -> None:
        """Build a kernel that is not Triton's on a thread, once for each key.

        name    name of the kernel, for the report
        build   compiles and loads the kernel; returns True if it was in the cache on disk
        """
        if key not in self.added:
            self.added.add(key)
            self.kernels.append((name, self.threads.submit(lambda: self.compiled(cache_hit=build()))))

    def compiled(self, *, cache_hit: bool, **_: object) -> None:
        """Count a kernel; Triton calls this for its own. cache_hit: True if the kernel was in the cache on disk."""
        self.on_disk.append(cache_hit)

    def report(self) -> CompileReport:
        """Return the counts and failures of the compilation. Call it after the end of the `with` block."""
        failed = [(name, reason(error)) for name, future in self.kernels if (error := future.exception())]
        return CompileReport(
            num_kernels=len(self.kernels),
            num_compiled=self.on_disk.count(False),
            seconds=self.seconds,
            failed=tuple(failed),
        )


def reason(error: BaseException) -> str:
    """Return the line of a compilation's error that names the fault.

    Triton raises an error for each function on the way to the fault, the innermost as the cause of the others. Each one
    quotes the source up to the place of the call, with "^" below it. ptxas, MLIR and NVRTC write "error" before the
    fault.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^~")]
    named = [line for line in lines if re.search(r"\b(error|fatal) +:|: (catastrophic )?error:", line)]
    return (named[:1] or lines[-1:] or [type(error).__name__])[0]


_AHEAD: ContextVar[Ahead | None] = ContextVar("ahead", default=None)


def ahead_of_launch() -> Ahead | None:
    """Return the compilation in whose block this thread is: a launch adds its kernel there, and runs nothing."""
    return _AHEAD.get()


@contextmanager
def compiling_ahead() -> Iterator[Ahead]:
    """Compile kernels instead of running them: in the `with` block, a launch by this thread only compiles the kernel.

    A pool of threads compiles. The end of the block waits for all compilations. The report lists kernels that cannot
    be compiled; a later launch of such a kernel raises its error.
    """
    on_gpu = torch.cuda.is_available() and not INTERPRETED
    enter = functools.partial(torch.cuda.set_device, torch.cuda.current_device()) if on_gpu else None
    count = min(MAX_THREADS, os.cpu_count() or 1)
    ahead = Ahead(threads=ThreadPoolExecutor(count, thread_name_prefix="quire-compile", initializer=enter))
    if triton is None or INTERPRETED:
        yield ahead
        return
    compilation, listener = triton.knobs.compilation, triton.knobs.compilation.listener
    compilation.listener = ahead.compiled
    try:
        with ahead.threads, _launching_nothing(ahead), _mode(ahead):
            yield ahead
    finally:
        compilation.listener = listener
        ahead.seconds = perf_counter() - ahead.began


@contextmanager
def _launching_nothing(ahead: Ahead) -> Iterator[None]:
    """Make a launch of this thread look its kernel up, or add it to `ahead`; other threads launch as usual."""
    owner, function = threading.get_ident(), triton.runtime.jit.JITFunction
    launch = function.run

    @functools.wraps(launch)
    def look_up(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return launch(self, *args, grid=grid, warmup=warmup, **options)
        ahead.launching = self.fn.__name__
        return launch(self, *args, grid=grid, warmup=True, **options)

    function.run, before = look_up, _AHEAD.set(ahead)
    try:
        yield
    finally:
        function.run = launch
        _AHEAD.reset(before)


def _mode(ahead: Ahead) -> Any:
    """Return Triton's mode for compiling in threads, extended: each compilation also loads the kernel."""
    base: Any = triton.AsyncCompileMode

    class Mode(base):  # type: ignore[misc]
        """Triton's mode of compiling in threads. It also loads each compiled kernel, and adds it to `ahead.kernels`."""

        def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
            def prepare() -> Any:
                kernel = compile_fn()
                kernel.run  # noqa: B018 - the property builds the launcher and loads the kernel
                return kernel

            known = len(self.raw_futures)
            future = super().submit(key, prepare, finalize_fn)
            if len(self.raw_futures) > known:
                ahead.kernels.append((ahead.launching, future.future))
            return future

    return Mode(ahead.threads, ignore_errors=True)
