"""Kernels compiled ahead are those that launches ask for. Needs the compiler and no GPU: the driver is a stand-in."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.kernels import compile_cache as cache
from quire.kernels import triton_runtime
from quire.kernels.compile_cache import CompileReport, use_cache_folder

# Runs in a process of its own: the interpreter must be off, the driver is replaced for the whole process.
PROGRAM = """
import sys, json, torch
from quire.kernels import compile_cache as cache
from quire.kernels.triton_runtime import jit, triton, tl
from triton.backends.compiler import GPUTarget

class Driver:
    launched = []
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    class launcher_cls:
        def __init__(self, src, metadata): pass
        def __call__(self, *args): Driver.launched.append(args[0])
    class utils:
        @staticmethod
        def load_binary(name, kernel, shared, device): return object(), object(), 0, 0, 1024
        @staticmethod
        def get_device_properties(device): return {"max_shared_mem": 1 << 20}

triton.runtime.driver.set_active(Driver())
cache.use_cache_folder(__import__("pathlib").Path(sys.argv[1]))

@jit
def scale(x, y, n, stride, factor: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at * stride, tl.load(x + at, mask=at < n) * factor, mask=at < n)

@jit
def broken_inside(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), x_is_not_there)

@jit
def broken(x, BLOCK: tl.constexpr):
    broken_inside(x, BLOCK)

x, y = torch.zeros(4096), torch.empty(4096)
compiled = []
real_compile = triton.compiler.compile
def steps():
    for n in (16, 17, 64, 17):              # divisible by 16, not, divisible again, seen before
        scale[(1,)](x, y, n, 1, 2.0, BLOCK=64, num_warps=2)
    scale[(1,)](x[1:], y, 16, 1, 2.0, BLOCK=64, num_warps=2)    # a pointer that is not aligned
    scale[(1,)](x.to(torch.bfloat16), y, 16, 3, 2.0, BLOCK=64, num_warps=2)
with cache.compiling_ahead() as ahead:
    steps()
    if len(sys.argv) > 2: broken[(1,)](x, BLOCK=64)
launched_inside = len(Driver.launched)
scale.compile = lambda *a, **k: sys.exit("a launch had to compile")
steps()
report = ahead.report()
print(json.dumps([report.num_kernels, report.num_compiled, launched_inside, len(Driver.launched), report.failed]))
"""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore Triton's cache folder after each test."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    yield
    if cache.triton is not None:
        del cache.triton.knobs.cache.dir


def run(*args: str, **environment: str) -> list[object]:
    pytest.importorskip("triton")
    keep = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # From a file, because Triton reads the source of a kernel.
    program = Path(args[0]).parent / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), *args], capture_output=True, text=True, timeout=300, env=keep | environment
    )
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_was_compiled_ahead_is_what_is_launched(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    assert run(str(folder)) == [4, 4, 0, 6, []]
    assert len(list(folder.glob("*/scale.cubin"))) == 4
    assert run(str(folder)) == [4, 0, 0, 6, []], "the second process finds all of them on the disk"


def test_what_cannot_be_compiled_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    *counts, failed = run(str(tmp_path / "kept"), "broken")
    assert counts == [5, 4, 0, 6]
    ((name, why),) = failed  # type: ignore[misc]
    assert name == "broken" and "x_is_not_there" in why


def caused(*words: str) -> Exception:
    """Return an error of each text, the next one as its cause."""
    error = Exception(words[0])
    error.__cause__ = caused(*words[1:]) if words[1:] else None
    return error


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["at 46:14:\n    acc = inner(x)\n          ^", 'at 3:4:\n    return y\n    ^\nTypeError("no type")'],
            'TypeError("no type")',
        ),
        (
            [
                "PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas /a.ptx, line 7; error   : no\n"
                "ptxas fatal   : Ptx assembly aborted due to errors\n\nRepro command: ptxas -v /a.ptx\n"
            ],
            "ptxas /a.ptx, line 7; error   : no",
        ),
        (
            ["a.py:3:4: error: 'tt.dot' wants more\n    acc = dot(x)\n          ^"],
            "a.py:3:4: error: 'tt.dot' wants more",
        ),
        (["PassManager::run failed"], "PassManager::run failed"),
        (["  ^\n"], "Exception"),
        ([""], "Exception"),
    ],
)
def test_the_line_of_an_error_that_names_the_fault(words: list[str], line: str) -> None:
    assert cache.reason(caused(*words)) == line


def test_a_folder_that_cannot_be_written_gives_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder, note = use_cache_folder(tmp_path / "file" / "cache")
    assert folder.is_dir() and os.access(folder, os.W_OK) and "set QUIRE_CACHE_DIR" in note
    folder, note = use_cache_folder(tmp_path / "good")
    assert folder == tmp_path / "good" and note == ""


def test_the_folder_is_quire_s_unless_triton_s_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    assert use_cache_folder()[0] == tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert use_cache_folder()[0] == tmp_path / "other"


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU for which kernels can be compiled, as far as anybody asks."""
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_runtime, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton_runtime.shutil, "which", lambda name: "/bin/cc" if name == "clang" else None)
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "Python.h")


@pytest.mark.usefixtures("gpu_machine")
def test_what_triton_needs_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = triton_runtime.missing.__wrapped__
    assert missing() == ""
    monkeypatch.setenv("CC", "/opt/own/cc")
    assert "a C compiler (/opt/own/cc): install one" in missing()
    monkeypatch.setattr(triton_runtime.shutil, "which", lambda name: "yes" if name == "/opt/own/cc" else None)
    assert missing() == ""
    monkeypatch.delenv("CC")
    assert "a C compiler (gcc or clang): install one, or name it in CC" in missing()
    monkeypatch.setattr(triton_runtime.shutil, "which", lambda name: name)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert "Python.h" in missing()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert missing() == "needs compute capability 8.0, this GPU has 7.5"


def test_a_report_is_a_line() -> None:
    report = CompileReport(num_kernels=5, num_compiled=3, seconds=1.26, failed=(("a", "no"),))
    assert str(report) == "5 kernels in 1.3 s, 3 of them compiled; a failed: no"
