"""Building, loading and running the C kernels: what can go wrong is a reason, not a crash."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.config.env import cache_folder
from quire.kernels.linear import native as linear
from quire.kernels.native import build, library, memory
from quire.kernels.norm import native as norm
from quire.kernels.norm import ref as norm_ref
from quire.platforms.cpu import read_cpu_flags

FLAGS = frozenset(build.NEEDED)
needs_library = pytest.mark.skipif(bool(library.missing()), reason=library.missing() or "runs")
needs_tiles = pytest.mark.skipif(bool(linear.SUPPORT.missing), reason=linear.SUPPORT.missing or "runs")


def fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(shutil, "which", lambda name: str(path) if name == "cc" else None)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build.platform, "system", lambda: "Linux")


def test_other_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    with pytest.raises(build.CannotBuild, match="not aarch64"):
        build.build(tmp_path, FLAGS)


def test_a_cpu_that_lacks_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, monkeypatch, "true")
    with pytest.raises(build.CannotBuild, match="this CPU has no avx512bw"):
        build.build(tmp_path, FLAGS - {"avx512bw"})


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_compiler(tmp_path, monkeypatch, "true")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.CannotBuild, match="no C compiler"):
        build.build(tmp_path, FLAGS)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('[ "$1" = --version ] || { echo "x.c:1: error: boom" >&2; exit 1; }', "failed: x.c:1: error: boom"),
        ("exit 3", "failed: no message"),
    ],
)
def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str) -> None:
    fake_compiler(tmp_path, monkeypatch, script)
    with pytest.raises(build.CannotBuild, match=said):
        build.build(tmp_path / "cache", FLAGS)
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_compiler(tmp_path, monkeypatch, "true")
    with pytest.raises(build.CannotBuild, match="kernel cache .*cc/below cannot be written"):
        build.build(tmp_path / "cc" / "below", FLAGS)


def test_a_library_is_compiled_once_for_each_cpu_and_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = f'[ "$1" = --version ] || echo compiled >> {tmp_path}/log'
    fake_compiler(tmp_path, monkeypatch, script)
    first = build.build(tmp_path / "cache", FLAGS)
    assert build.build(tmp_path / "cache", FLAGS) == first
    assert build.build(tmp_path / "cache", FLAGS | {"amx_tile"}) != first
    fake_compiler(tmp_path, monkeypatch, f'{script}\n[ "$1" != --version ] || echo 2.0')
    assert build.build(tmp_path / "cache", FLAGS) != first
    assert (tmp_path / "log").read_text().count("compiled") == 3
    assert all(path.name.startswith("quire-") for path in (tmp_path / "cache").iterdir())


INTERRUPTED = """\
import pathlib, shutil, signal, sys
from quire.kernels.native import build
before = {"raises": signal.default_int_handler, "ends": lambda number, frame: build.os._exit(130)}[sys.argv[2]]
signal.signal(signal.SIGINT, before)
shutil.which = lambda name: sys.argv[1] + "/cc"
try:
    build.build(pathlib.Path(sys.argv[1], "cache"), frozenset(build.NEEDED))
except KeyboardInterrupt:
    sys.exit(131 if signal.getsignal(signal.SIGINT) is before else 1)
"""
SLOW = """
[ "$1" = --version ] && exit
sleep 60 &
echo $! > {0}/child
touch {0}/started
wait
"""


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def ended(child: Path) -> bool:
    try:
        return "(zombie)" in Path("/proc", child.read_text().strip(), "status").read_text()
    except OSError:
        return True


@pytest.mark.parametrize("trap", ["", "trap '' TERM"])
def test_a_compiler_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str) -> None:
    fake_compiler(tmp_path, monkeypatch, trap + SLOW.format(tmp_path))
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.5)
    monkeypatch.setattr(build, "END_SECONDS", 0.2)
    with pytest.raises(build.CannotBuild, match="cc cannot be run .TimeoutExpired"):
        build.build(tmp_path / "cache", FLAGS)
    assert not list((tmp_path / "cache").iterdir())
    wait_until(lambda: ended(tmp_path / "child"))


@pytest.mark.parametrize(("handler", "code"), [("raises", 131), ("ends", 130)])
def test_an_interrupt_leaves_neither_a_file_nor_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: str, code: int
) -> None:
    """Whether Ctrl-C raises or, as while a command starts, ends the process at once. In a process of its own."""
    fake_compiler(tmp_path, monkeypatch, SLOW.format(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, tmp_path, handler])
    wait_until((tmp_path / "started").exists)
    assert [path.name[:9] for path in (tmp_path / "cache").iterdir()] == ["building-"]
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == code and not list((tmp_path / "cache").iterdir())
    wait_until(lambda: ended(tmp_path / "child"))


def test_what_a_killed_build_left_is_removed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, monkeypatch, "true")
    left = tmp_path / "cache" / "building-left.so"
    left.parent.mkdir()
    with build._own_name(left.parent) as mine:  # while another process builds
        left.touch()
        build.build(left.parent, FLAGS)
        assert left.exists() and mine.exists()
    assert left.exists() and not mine.exists()
    build.build(left.parent, FLAGS, fresh=True)
    assert not left.exists()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("QUIRE_CACHE_DIR", "~/kept")
    assert cache_folder() == tmp_path / "kept"


@needs_library
def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    path = build.build(tmp_path, read_cpu_flags())
    path.write_bytes(b"not a library")
    assert library._load(tmp_path).quire_rms_norm
    assert path.read_bytes()[:4] == b"\x7fELF"


LOAD = """\
import ctypes, pathlib, shutil, sys
from quire.kernels.native import build
from quire.platforms.cpu import read_cpu_flags
build._compile = lambda command, library: shutil.copy(sys.argv[2], library)
assert ctypes.CDLL(str(build.build(pathlib.Path(sys.argv[1]), read_cpu_flags()))).quire_enable_amx is not None
"""


@needs_tiles
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.9, 0.999], ids=str)
@pytest.mark.parametrize("tail", ["missing", "zero"])
def test_a_part_of_a_library_is_never_loaded(tmp_path: Path, kept: float, tail: str) -> None:
    """In a process of its own: the loader, or the first page that is missing, would end this one."""
    whole = build.build(cache_folder() / "kernels", read_cpu_flags())
    data, size = whole.read_bytes(), int(whole.stat().st_size * kept)
    damaged = tmp_path / whole.name
    damaged.write_bytes(data[:size] + (bytes(len(data) - size) if tail == "zero" else b""))
    assert not build.intact(damaged)
    done = subprocess.run([sys.executable, "-c", LOAD, tmp_path, whole], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert damaged.read_bytes() == data


@needs_library
def test_another_library_under_our_name_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "other.c"
    source.write_text("int other(void) { return 1; }")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(build.CannotBuild, match="lack a function"):
        library._load(tmp_path)


MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 12                         /opt/my libs/torch/libgomp-a34b3233.so.1
7f0000001000-7f0000002000 rw-p 00000000 08:01 12                         /opt/my libs/torch/libgomp-a34b3233.so.1
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
7f0000003000-7f0000004000 r-xp 00000000 08:01 13                         /opt/old one/libiomp5.so (deleted)
7f0000004000-7f0000005000 r-xp 00000000 08:01 14                         /usr/lib/libm.so.6
7ffd00000000-7ffd00001000 rw-p 00000000 00:00 0                          [stack]
"""


def test_paths_of_openmp_runtimes_may_hold_spaces() -> None:
    assert library.openmp_runtimes(MAPS) == ["/opt/my libs/torch/libgomp-a34b3233.so.1", "/opt/old one/libiomp5.so"]


@pytest.mark.parametrize(
    ("maps", "said"),
    [(MAPS, "cannot be shared .*/opt/my libs/torch"), ("", "no OpenMP runtime"), (None, "cannot be shared .*No such")],
)
def test_an_openmp_runtime_that_cannot_be_shared_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maps: str | None, said: str
) -> None:
    monkeypatch.setattr(library, "MAPS", tmp_path / "maps")
    if maps is not None:
        library.MAPS.write_text(maps)
    with pytest.raises(build.CannotBuild, match=said):
        library._parallel_region()


@needs_library
def test_processes_may_race(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: build.build(tmp_path, read_cpu_flags(), fresh=True), range(3)))
    assert [*tmp_path.iterdir()] == [*paths]


@needs_library
def test_there_is_one_openmp_runtime() -> None:
    library.loaded()
    assert len(library.openmp_runtimes(library.MAPS.read_text())) == 1


@needs_library
def test_sources_keep_the_size_of_kernels() -> None:
    for path in build.sources():
        lines = path.read_text().splitlines()
        assert len(lines) <= 800 and all(len(line) <= 120 for line in lines), path


@needs_tiles
def test_threads_that_come_together_do_not_disturb_each_other() -> None:
    weight = torch.randn(512, 256).bfloat16()
    packed = linear.pack(weight)
    inputs = [torch.randn(rows, 256).bfloat16() for rows in (1, 5, 40, 200)]
    expected = [linear.run(x, packed, None) for x in inputs]

    def work(x: torch.Tensor) -> list[torch.Tensor]:
        return [linear.run(x, packed, None) for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        for found, right in zip(pool.map(work, inputs), expected, strict=True):
            assert all(torch.equal(one, right) for one in found)


@needs_tiles
def test_a_forked_child_has_threads_of_its_own() -> None:
    x, weight = torch.randn(64, 1024).bfloat16(), torch.rand(1024).bfloat16()
    expected = norm.rms_norm(x, weight, 1e-5)
    right = expected.view(torch.int16).numpy().tobytes()  # PyTorch's own operations may hang in a forked child
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if norm.rms_norm(x, weight, 1e-5).view(torch.int16).numpy().tobytes() == right else 1)
    assert os.waitpid(child, 0)[1] == 0
    torch.testing.assert_close(expected, norm_ref.rms_norm(x, weight, 1e-5), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(3, 5), (1 << 20,), (700, 4099)], ids=str)
def test_memory_of_any_size(shape: tuple[int, ...]) -> None:
    tensor = memory.empty(shape, torch.bfloat16)
    assert tensor.shape == shape and tensor.is_contiguous() and tensor.dtype == torch.bfloat16
    tensor.fill_(1.0)
    if tensor.numel() * 2 >= memory.HUGE_PAGE:
        assert tensor.data_ptr() % memory.HUGE_PAGE == 0
