"""Build the C sources of this package into one shared library in the kernel cache, when it is first needed.

A wheel may carry libraries that were built before (see `levels.py`).

The library's name is a hash of everything that it depends on: sources, flags (which follow the CPU), compiler version.
It is written under a temporary name and renamed, so that processes may race. It ends with a hash of its bytes: loading
an incomplete library would kill the process, so only a complete one is loaded. A library that another user could have
written is refused. A missing or failing compiler, or a folder that cannot be written, raises `CannotBuild` with the
reason.
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from quire.config.env import absent_variables, with_variables

KERNELS = Path(__file__).resolve().parents[1]
SOURCE = KERNELS / "native" / "all.c"
COMPILERS = ("cc", "gcc", "clang")
BASE_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-ffp-contract=off")
NEEDED = {"avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c"}  # /proc/cpuinfo -> flag
WIDE = {"avx512f": "-mavx512f", "avx512bw": "-mavx512bw", "avx512dq": "-mavx512dq", "avx512vl": "-mavx512vl"}
USED = {"3dnowprefetch": "-mprfchw"}
USED_NARROW = {"avx_vnni": "-mavxvnni"}
USED_WIDE = {
    "avx512_vnni": "-mavx512vnni",
    "avx512_bf16": "-mavx512bf16",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
}
NEW = ("-mavxvnni", *USED_WIDE.values())  # an older compiler may lack them: the kernels do without
TRAILER = hashlib.sha256().digest_size  # bytes of the hash after the library; the loader does not read them
ROOM = 1 << 20  # free bytes on the disk that a build needs; a library is much smaller
COMPILE_SECONDS = 600  # limit of a compilation, which takes 15 of a core: a busy machine needs more
END_SECONDS = 1  # for a compiler to end after a signal


class CannotBuild(Exception):
    """Error: the native kernels cannot be compiled here. The message is the reason."""


class CompilerFails(CannotBuild):
    """Error: a compiler failed. Another compiler may succeed."""


def build(folder: Path, cpu_flags: frozenset[str], *, fresh: bool = False) -> Path:
    """Return the path of this machine's library of native kernels in `folder`; compile it if it is not there.

    If a compiler fails, the others are tried; then all of them without the flags that only new compilers know. Raises
    `CannotBuild` if all fail.

    cpu_flags   flags of this CPU in /proc/cpuinfo
    fresh       True: compile it even if it is there
    """
    _refuse_other_systems()
    lacking = [flag for flag in NEEDED if flag not in cpu_flags]
    if lacking:
        raise CannotBuild(f"this CPU has no {lacking[0]}")
    compilers = _compilers()
    _make_folder(folder)
    flags = [*BASE_FLAGS, *units(cpu_flags)]
    old_flags = [flag for flag in flags if flag not in NEW]
    end, failures = time.monotonic() + COMPILE_SECONDS, []
    for some, compiler in itertools.product([flags] if flags == old_flags else [flags, old_flags], compilers):
        try:
            return _built(folder, compiler, some, fresh)
        except CompilerFails as failure:
            failures.append(failure)
        if time.monotonic() > end:
            break
    raise failures[0]


def compile_for(units: list[str], library: Path) -> None:
    """Compile the sources into `library` for the vector units of some CPU, with the first compiler that succeeds.

    units   compiler flags, see `units`

    Raises `CannotBuild` on other systems than x86-64 Linux, and if no compiler succeeds.
    """
    _refuse_other_systems()
    failures = []
    for compiler in _compilers():
        try:
            return _compile([compiler, *BASE_FLAGS, *units], library)
        except CompilerFails as failure:
            failures.append(failure)
    raise failures[0]


def units(cpu_flags: frozenset[str]) -> list[str]:
    """Return the compiler flags for the vector units of a CPU with the flags `cpu_flags` of /proc/cpuinfo.

    A CPU with all flags of WIDE gets AVX-512 and its extensions, any other AVX2 (see vectors.h).
    """
    known = NEEDED | USED | (WIDE | USED_WIDE if cpu_flags >= WIDE.keys() else USED_NARROW)
    return [known[flag] for flag in known if flag in cpu_flags]


def _refuse_other_systems() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CannotBuild(f"native kernels are for x86-64 Linux, not {platform.machine()} {platform.system()}")


def _compilers() -> list[str]:
    found = [path for name in COMPILERS if (path := shutil.which(name))]
    if not found:
        raise CannotBuild("there is no C compiler (cc, gcc or clang): install one")
    return found


def _built(folder: Path, compiler: str, flags: list[str], fresh: bool) -> Path:
    library = folder / f"quire-{_key(compiler, flags)}.so"
    if fresh or not intact(library):
        _compile([compiler, *flags], library)
    _refuse_foreign(library)
    return library


def _make_folder(folder: Path) -> None:
    if not folder.is_absolute():
        raise CannotBuild(f"the kernel cache {folder} is not an absolute path: set QUIRE_CACHE_DIR to one")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CannotBuild(
            f"the kernel cache {folder} cannot be written ({error.strerror}): set QUIRE_CACHE_DIR to a folder that can"
        ) from None
    _refuse_foreign(folder)


def _refuse_foreign(path: Path) -> None:
    """Raise `CannotBuild` if another user could have written `path`: its code would run as this user."""
    held = path.stat()
    if held.st_uid not in (0, os.geteuid()):
        raise CannotBuild(
            f"the kernel cache {path} belongs to user {held.st_uid}: set QUIRE_CACHE_DIR to a folder of your own"
        )
    if held.st_mode & 0o022:
        raise CannotBuild(
            f"the kernel cache {path} can be written by other users: run `chmod go-w {path}`, or delete it"
        )


def intact(library: Path) -> bool:
    """Return True if `library` exists and is complete and unchanged. Hashing it takes less than a millisecond."""
    try:
        held = library.read_bytes()
    except OSError:
        return False
    return held[-TRAILER:] == hashlib.sha256(held[:-TRAILER]).digest()


def sources() -> list[Path]:
    """Return the paths of all C files of the kernels."""
    return sorted(path for path in KERNELS.rglob("*") if path.suffix in (".c", ".h"))


def _key(compiler: str, flags: list[str]) -> str:
    digest = hashlib.sha256(" ".join([compiler, *flags]).encode())
    digest.update(_output([compiler, "--version"]))
    hash_sources(digest)
    return digest.hexdigest()[:20]


def hash_sources(digest: "hashlib._Hash") -> None:
    """Add the names and texts of all C files of the kernels to `digest`."""
    for path in sources():
        digest.update(path.relative_to(KERNELS).as_posix().encode())
        digest.update(path.read_bytes())


def _compile(command: list[str], library: Path) -> None:
    try:
        if shutil.disk_usage(library.parent).free < ROOM:
            raise CannotBuild(
                f"there is no room for the kernel cache {library.parent}: the disk is full. Free "
                "1 MiB, or set QUIRE_CACHE_DIR to a folder on another disk"
            )
        with _raising_interrupts(), _own_name(library.parent) as name:
            _output([*command, str(SOURCE), "-o", str(name), "-lm"])
            seal(name)
            name.chmod(0o755)
            name.replace(library)
    except OSError as error:
        raise CannotBuild(
            f"the kernel cache {library.parent} cannot be written ({error.strerror}): set "
            "QUIRE_CACHE_DIR to a folder that can"
        ) from None


@contextlib.contextmanager
def _own_name(folder: Path) -> Iterator[Path]:
    """Give a temporary file to build in; it is removed at the end.

    A process that builds alone first removes the files of killed processes, whose locks ended with them. If folders
    cannot be locked (NFS), such files stay.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in folder.glob("building-*.so"):
                left.unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="building-", suffix=".so", delete=False) as file:
            name = Path(file.name)
            try:
                yield name
            finally:
                name.unlink(missing_ok=True)
    finally:
        os.close(lock)


@contextlib.contextmanager
def _raising_interrupts() -> Iterator[None]:
    """Make Ctrl-C raise, so that everything is cleaned up; then call the earlier handler, which may end the process."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield  # it is ignored, or comes to another thread
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, before)
        before(signal.SIGINT, None)
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def seal(library: Path) -> None:
    """Append the hash that `intact` checks, and flush the file to the disk, before it gets its final name."""
    digest = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _output(command: list[str]) -> bytes:
    pipe = subprocess.PIPE
    variables = with_variables(absent_variables({"PATH": os.defpath}))  # a compiler looks for its linker there
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until it would be ended
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=variables, process_group=0
        ) as running:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                written, errors = running.communicate(timeout=COMPILE_SECONDS)
            except BaseException:  # end it and all its children; on SIGTERM they remove their own files
                for number in (signal.SIGTERM, signal.SIGKILL):
                    if running.poll() is None:
                        os.killpg(running.pid, number)
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            running.wait(END_SECONDS)
                raise
    except subprocess.TimeoutExpired:
        raise CompilerFails(
            f"{command[0]} took longer than {COMPILE_SECONDS:g} s: try again when the machine is less busy, or install "
            "another C compiler (cc, gcc or clang)"
        ) from None
    except OSError as error:
        raise CompilerFails(
            f"{command[0]} cannot be run ({type(error).__name__}): repair it, or install "
            "another C compiler (cc, gcc or clang)"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if running.returncode:
        lines = errors.decode(errors="replace").splitlines()
        said = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise CompilerFails(f"{command[0]} failed: {said.strip()[:200]}")
    return written
