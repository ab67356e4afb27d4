"""Building, loading and running the C kernels: what can go wrong is a reason, not a crash."""

import errno
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.config.env import cache_folder
from quire.kernels.attention import KVView
from quire.kernels.heads import native as heads
from quire.kernels.linear import native as linear
from quire.kernels.native import build, library, memory
from quire.kernels.norm import native as norm
from quire.kernels.norm import ref as norm_ref
from quire.platforms.cpu import read_cpu_flags

from ...support.full import FULL, full_rows

FLAGS = frozenset(build.NEEDED | build.WIDE)
NATIVE = "native or panels or int8"  # the tests of C kernels
needs_library = pytest.mark.skipif(bool(library.missing()), reason=library.missing() or "runs")
FIRST_TILES = """
import torch
from quire.kernels.linear import native
weight = torch.ones(32, 64, dtype=torch.bfloat16)
print(float(native.run_float(weight[:1], native.pack(weight), None).sum()))
"""
needs_tiles = pytest.mark.skipif(bool(library.missing_amx()), reason=library.missing_amx() or "runs")


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
    with pytest.raises(build.CannotBuild, match="this CPU has no f16c"):
        build.build(tmp_path, FLAGS - {"f16c"})


def test_vectors_are_as_wide_as_the_cpu() -> None:
    """An extension of AVX-512 is of no use without the four parts of it that the kernels need."""
    narrow = ["-mavx2", "-mfma", "-mf16c"]
    assert build.units(frozenset(build.NEEDED)) == narrow
    assert build.units(FLAGS - {"avx512bw"} | {"avx512_bf16", "amx_tile", "sse2"}) == narrow
    assert build.units(FLAGS | {"amx_tile"}) == [*narrow, *build.WIDE.values(), "-mamx-tile"]
    products = {"avx_vnni", "avx512_vnni"}  # of int8: the one of 256 bits is not for CPUs with 512
    assert build.units(frozenset(build.NEEDED) | products) == [*narrow, "-mavxvnni"]
    assert build.units(FLAGS | products) == [*narrow, *build.WIDE.values(), "-mavx512vnni"]


@needs_library
@pytest.mark.parametrize(
    "level",
    [
        "-mavx2 -mfma -mf16c",
        "-march=alderlake",
        "-march=skylake-avx512",
        "-march=icelake-server",
        "-march=sapphirerapids",
    ],
)
def test_the_source_compiles_for_every_level_without_a_warning(tmp_path: Path, level: str) -> None:
    compiler = next(path for name in build.COMPILERS if (path := shutil.which(name)))
    command = [compiler, *build.BASE_FLAGS, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *level.split()]
    done = subprocess.run([*command, build.SOURCE], capture_output=True, text=True)
    if "bad value" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("an older compiler does not know this level")
    assert done.returncode == 0, done.stderr


@needs_library
@pytest.mark.skipif("avx512f" not in read_cpu_flags(), reason="this CPU has AVX2 only: other tests run it")
@pytest.mark.parametrize(
    "without",
    [
        "avx512f",
        *full_rows(("avx512f,avx_vnni", "avx512_vnni", "avx512_bf16,amx_tile,amx_bf16")),
    ],
)
def test_the_kernels_of_lesser_cpus_on_a_cpu_with_more(without: str) -> None:
    """A part of the tests of kernels, or with --full all: a CPU that has no more runs them all anyway."""
    folder = Path(__file__).parent
    files = [
        folder / f"test_{name}.py" for name in ("small_ops", "attention", "attention_scores", "experts", "quantized")
    ]
    fewer = [] if FULL else ["-p", "tests.support.every_seventh"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *fewer, "-k", NATIVE, *files],
        cwd=folder.parents[2],
        env=os.environ | {"QUIRE_CPU_WITHOUT": without},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-2000:]


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


def test_a_cache_on_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_compiler(tmp_path, monkeypatch, "true")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=16384))
    with pytest.raises(build.CannotBuild, match=f"no room for the kernel cache {tmp_path}/cache"):
        build.build(tmp_path / "cache", FLAGS)


def test_a_cache_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would be in whatever folder the command is started in."""
    fake_compiler(tmp_path, monkeypatch, "true")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(build.CannotBuild, match="~/.cache/quire/kernels is not an absolute path"):
        build.build(Path("~/.cache/quire/kernels"), FLAGS)
    assert not (tmp_path / "~").exists()


def belong_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize("what", ["folder", "library"])
@pytest.mark.parametrize("fault", ["owner", "group", "all"])
def test_what_another_user_may_have_written_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str, fault: str
) -> None:
    fake_compiler(tmp_path, monkeypatch, "true")
    library = build.build(tmp_path / "cache", FLAGS)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert build.build(tmp_path / "cache", FLAGS) == library
    path = library if what == "library" else library.parent
    if fault == "owner":
        belong_to_another(path, monkeypatch)
    else:
        path.chmod(0o770 if fault == "group" else 0o707)
    with pytest.raises(build.CannotBuild, match="belongs to user" if fault == "owner" else "written by other users"):
        build.build(tmp_path / "cache", FLAGS)


OLD = """\
for word in "$@"; do
    case $word in -mamx*|-mavx512bf16) echo "cc: error: unrecognized option $word" >&2; exit 1;; esac
done
"""


@needs_tiles
def test_a_compiler_older_than_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the kernels that need what it does not know are missing. It does not optimize, which takes longer."""
    real = next(path for name in build.COMPILERS if (path := shutil.which(name)))
    fake_compiler(tmp_path, monkeypatch, f'{OLD}exec {real} "$@" -O0')
    loaded = library._load(tmp_path / "cache")
    assert library.missing(lambda: loaded) == ""
    assert "gcc 11, clang 12, or newer" in library.missing_amx(lambda: loaded)


@pytest.mark.parametrize("broken", ["exit 1", "[ $1 = --version ] || exit 1", "kill -9 $$"])
def test_another_compiler_may_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Also one that comes later in the list."""
    fake_compiler(tmp_path, monkeypatch, broken)
    (tmp_path / "bin").mkdir()
    fake_compiler(tmp_path / "bin", monkeypatch, f"echo $@ >> {tmp_path}/log")
    monkeypatch.setattr(
        shutil,
        "which",
        lambda name: str({"cc": tmp_path, "clang": tmp_path / "bin"}[name] / "cc") if name != "gcc" else None,
    )
    path = build.build(tmp_path / "cache", FLAGS | {"amx_tile"})
    assert build.build(tmp_path / "cache", FLAGS | {"amx_tile"}) == path and build.intact(path)
    compiled = [line for line in (tmp_path / "log").read_text().splitlines() if "--version" not in line]
    assert len(compiled) == 1 and "-mamx-tile" in compiled[0]


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
import pathlib, shutil, signal, subprocess, sys, time
from quire.kernels.native import build
before = {"raises": signal.default_int_handler, "ends": lambda number, frame: build.os._exit(130)}[sys.argv[2]]
signal.signal(signal.SIGINT, before)
shutil.which = lambda name: sys.argv[1] + "/cc"
class Slow(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        time.sleep(0.3)
if sys.argv[3] == "at once":
    subprocess.Popen = Slow
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
    with pytest.raises(build.CannotBuild, match="cc took longer than 0.5 s: try again"):
        build.build(tmp_path / "cache", FLAGS)
    assert not list((tmp_path / "cache").iterdir())
    wait_until(lambda: ended(tmp_path / "child"))


@pytest.mark.parametrize("when", ["later", "at once"])
@pytest.mark.parametrize(("handler", "code"), [("raises", 131), ("ends", 130)])
def test_an_interrupt_leaves_neither_a_file_nor_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: str, code: int, when: str
) -> None:
    """Ctrl-C either raises or ends the process at once, as while a command starts. The test runs in its own process."""
    fake_compiler(tmp_path, monkeypatch, SLOW.format(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, tmp_path, handler, when])
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


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that writes a copy of the library that there is: the real one takes seconds."""
    whole = build.build(cache_folder() / "kernels", read_cpu_flags())
    monkeypatch.setattr(build, "_compile", lambda command, library: shutil.copy(whole, library))


@needs_library
@pytest.mark.usefixtures("copied")
def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    path = build.build(tmp_path, read_cpu_flags())
    path.write_bytes(b"not a library")
    assert library._load(tmp_path).quire_norm
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
@pytest.mark.parametrize("function", ["other", "quire_record"])
def test_another_library_under_our_name_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    source = tmp_path / "other.c"
    source.write_text(f"int {function}(void) {{ return 1; }}")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(build.CannotBuild, match="lack a function"):
        library._load(tmp_path)


@needs_library
@pytest.mark.usefixtures("copied")
def test_processes_may_race(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: build.build(tmp_path, read_cpu_flags(), fresh=True), range(3)))
    assert [*tmp_path.iterdir()] == [*paths]


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


def helper_ticks() -> dict[str, int]:
    """CPU time of every other thread of this process, in hundredths of a second."""
    ticks = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        ticks[task.name] = int(fields[11]) + int(fields[12])
    del ticks[str(threading.get_native_id())]
    return ticks


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@needs_tiles
@pytest.mark.usefixtures("two_threads")
def test_helpers_that_sleep_are_woken_and_work() -> None:
    """Each of these takes tens of milliseconds; one that only looked would take a tenth of one."""
    x, packed = torch.randn(2048, 2048).bfloat16(), linear.pack(torch.randn(4096, 2048).bfloat16())
    linear.run(x, packed, None)
    before = helper_ticks()
    for _ in range(60):
        time.sleep(0.002)  # they sleep after a tenth of one
        linear.run(x, packed, None)
        if max(now - before.get(task, 0) for task, now in helper_ticks().items()) >= 10:
            return
    pytest.fail("no helper took part")


@needs_tiles
@pytest.mark.usefixtures("two_threads")
def test_a_region_does_not_wait_for_that_of_another_thread() -> None:
    """Whoever comes while another thread has the helpers works alone."""
    rows, weight = torch.randn(64, 1024).bfloat16(), torch.rand(1024).bfloat16()
    x, packed = torch.randn(4096, 2048).bfloat16(), linear.pack(torch.randn(8192, 2048).bfloat16())
    expected, meanwhile = norm.rms_norm(rows, weight, 1e-5), 0
    for _ in range(12):
        long = threading.Thread(target=linear.run, args=(x, packed, None))  # a thousand times as long
        began = time.monotonic()
        long.start()
        time.sleep(0.01)
        found = norm.rms_norm(rows, weight, 1e-5)
        ended = time.monotonic()
        long.join()
        assert torch.equal(found, expected)
        meanwhile += ended - began < (time.monotonic() - began) / 2
        if meanwhile == 3:
            return
    pytest.fail("it waited")


@needs_tiles
@pytest.mark.usefixtures("two_threads")
def test_a_child_forked_in_the_middle_of_a_region_has_threads_too() -> None:
    rows, weight = torch.randn(64, 1024).bfloat16(), torch.rand(1024).bfloat16()
    x, packed = torch.randn(4096, 2048).bfloat16(), linear.pack(torch.randn(8192, 2048).bfloat16())
    norm.rms_norm(rows, weight, 1e-5)
    threads = []
    for _ in range(3):  # one may come between two regions
        thread = threading.Thread(target=linear.run, args=(x, packed, None))
        thread.start()
        time.sleep(0.02)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            norm.rms_norm(rows, weight, 1e-5)
            os._exit(len(os.listdir("/proc/self/task")))
        threads.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        thread.join()
    assert threads == [2, 2, 2]


@needs_tiles
@pytest.mark.usefixtures("two_threads")
def test_a_forked_child_has_threads_of_its_own() -> None:
    x, weight = torch.randn(64, 1024).bfloat16(), torch.rand(1024).bfloat16()
    expected = norm.rms_norm(x, weight, 1e-5)
    right = expected.view(torch.int16).numpy().tobytes()  # PyTorch's own operations may hang in a forked child
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        same = norm.rms_norm(x, weight, 1e-5).view(torch.int16).numpy().tobytes() == right
        os._exit(len(os.listdir("/proc/self/task")) if same else 100)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    torch.testing.assert_close(expected, norm_ref.rms_norm(x, weight, 1e-5), rtol=0.02, atol=0.02)


@needs_tiles
@pytest.mark.parametrize("rows", [33, 47, 48, 49, 63, 64, 65])
def test_the_last_rows_of_a_linear_fill_half_a_tile_or_more(rows: int) -> None:
    x, weight = torch.randn(rows, 96).bfloat16(), torch.randn(40, 96).bfloat16()
    found = linear.run(x, linear.pack(weight), None)
    torch.testing.assert_close(found.float(), x.float() @ weight.float().T, rtol=0.01, atol=0.05)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_are_stored_where_32_bits_do_not_reach(dtype: torch.dtype) -> None:
    page, count, size, dim = 8 << 20, 700, 32, 64
    no_reserve = 0x4000  # MAP_NORESERVE of Linux: pages that are not written take no memory
    try:
        mapped = mmap.mmap(-1, count * page * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(str(error))
    arena = torch.frombuffer(mapped, dtype=dtype)
    k, v = (arena.as_strided((count, 2, size, dim), (page, size * dim, dim, 1), at) for at in (0, 2 * size * dim))
    qkv, one, zero = torch.randn(3, 8, dim).to(dtype), torch.ones(3, dim).to(dtype), torch.zeros(3, dim).to(dtype)
    slots = torch.tensor([699 * size + 5, 650 * size, 520 * size + 31])
    heads.prepare(qkv, None, 0.0, one, zero, KVView(k, v), slots)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(k[slot // size, :, slot % size], qkv[i, 4:6])
        assert torch.equal(v[slot // size, :, slot % size], qkv[i, 6:])


def test_memory_where_there_are_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Without)
    assert memory.empty((1 << 20,), torch.bfloat16).fill_(1.0).sum() == 1 << 20


@pytest.mark.parametrize("shape", [(3, 5), (1 << 20,), (700, 4099)], ids=str)
def test_memory_of_any_size(shape: tuple[int, ...]) -> None:
    tensor = memory.empty(shape, torch.bfloat16)
    assert tensor.shape == shape and tensor.is_contiguous() and tensor.dtype == torch.bfloat16
    tensor.fill_(1.0)
    if tensor.numel() * 2 >= memory.HUGE_PAGE:
        assert tensor.data_ptr() % memory.HUGE_PAGE == 0


def test_a_compiler_has_a_path_where_this_process_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found in the default path, and would compile for half a minute and then find no linker there."""
    monkeypatch.delenv("PATH")
    assert f"PATH={os.defpath}".encode() in build._output(["/usr/bin/env"]).splitlines()


@needs_tiles
def test_tiles_are_there_for_a_process_that_asked_for_nothing() -> None:
    """As in a rank, whose kernels its core has chosen."""
    found = subprocess.run([sys.executable, "-c", FIRST_TILES], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.strip()) == (0, "2048.0"), found
