"""Engines of real ranks for tests: their sizes, faults planted in a rank, and the proof that nothing is left."""

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLANTED = Path(__file__).with_name("planted")  # on PYTHONPATH it plants a fault in a rank
WAIT_SECONDS = 60.0
OWNER, FAULT = "MANY_RANKS_OWNER", "MANY_RANKS_FAULT"
SIZES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2-pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp2-ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp2": {"data_parallel_size": 2},
    "dp2-ep": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "dp2-tp2-ep": {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
}  # fmt: skip
LARGER: dict[str, dict[str, Any]] = {  # four ranks and more
    "tp4": {"tensor_parallel_size": 4},
    "tp4-ep": {"tensor_parallel_size": 4, "enable_expert_parallel": True},
    "dp4": {"data_parallel_size": 4},
    "dp4-ep": {"data_parallel_size": 4, "enable_expert_parallel": True},
    "dp2-pp2-ep": {"data_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True},
    "tp8": {"tensor_parallel_size": 8},
    "tp8-ep": {"tensor_parallel_size": 8, "enable_expert_parallel": True},
    "dp8": {"data_parallel_size": 8},
    "dp8-ep": {"data_parallel_size": 8, "enable_expert_parallel": True},
    "dp4-tp2-ep": {"data_parallel_size": 4, "tensor_parallel_size": 2, "enable_expert_parallel": True},
    "tp4-pp2": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
}  # fmt: skip
DIVIDED: dict[str, dict[str, Any]] = {  # contexts, of latents
    "tp2-dcp2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "tp4-dcp2": {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
    "tp2-dcp2-pp2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp2-tp2-dcp2-ep": {
        "tensor_parallel_size": 2, "decode_context_parallel_size": 2, "data_parallel_size": 2,
        "enable_expert_parallel": True,
    },
}  # fmt: skip
SMALL: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "use_tqdm_on_load": False}


@dataclass(frozen=True)
class Fault:
    """A fault of a rank; see `planted/sitecustomize.py`.

    place   load, size, prefill, decode or mover;  kind  the name of a signal, RuntimeError, UserError or freeze
    """

    rank: int
    place: str
    kind: str

    def variables(self, moment: Path) -> dict[str, str]:
        """The environment in which ranks have this fault; the rank writes the time of the fault to `moment`."""
        path = os.pathsep.join(map(str, (PLANTED, ROOT / "src")))
        return {FAULT: f"{self.rank}:{self.place}:{self.kind}:{moment}", "PYTHONPATH": path}


@dataclass
class Left:
    """A folder for temporary files, and the variables of a program that uses it; `processes` finds its descendants."""

    folder: Path
    variables: dict[str, str]

    def processes(self) -> list[int]:
        """Return the processes with the mark of this test, without the test's own."""
        mark = f"{OWNER}={self.variables[OWNER]}".encode()
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdecimal() and mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:
                continue  # gone, or a zombie
        return [pid for pid in found if pid != os.getpid()]

    def ranks(self) -> list[int]:
        """Return the processes of ranks, in the order of their start."""
        return sorted(pid for pid in self.processes() if is_rank(pid))

    def kill(self) -> None:
        """End all processes of a test that failed."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def files(self) -> list[str]:
        """Return the names in the folder of temporary files, without the cache that PyTorch keeps there."""
        return sorted(name for name in os.listdir(self.folder) if not name.startswith("torchinductor_"))


def is_rank(pid: int) -> bool:
    """True for the process of a rank."""
    try:
        return b"quire.ranks.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """True for a process that a signal has stopped, or that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TtZ"
    except OSError:
        return True


@contextmanager
def nothing_left(folder: Path, seconds: float = WAIT_SECONDS) -> Iterator[Left]:
    """Assert that the block leaves no process, temporary file, shared memory or (in this process) descriptor.

    folder    for temporary files, also those of this process;  seconds  after the block until all must be gone
    """
    folder.mkdir(exist_ok=True)
    left = Left(
        folder,
        {OWNER: uuid.uuid4().hex, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    before, default = {name: os.environ.get(name) for name in left.variables}, tempfile.tempdir
    memory, descriptors = shared_memory(), open_files()
    os.environ.update(left.variables)
    tempfile.tempdir = str(folder)
    try:
        yield left
    except BaseException:
        left.kill()
        raise
    finally:
        tempfile.tempdir = default
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text
    ended = time.monotonic()
    try:
        until(lambda: not left.processes(), lambda: f"processes are left: {left.processes()}", seconds)
    except AssertionError:
        left.kill()
        raise
    print(f"all processes gone {time.monotonic() - ended:.2f} s after the block")
    until(lambda: not left.files(), lambda: f"files are left: {left.files()}", seconds)
    until(lambda: shared_memory() <= memory, lambda: f"left: {shared_memory() - memory}", seconds)
    until(lambda: open_files() <= descriptors, lambda: f"{open_files()} descriptors, not {descriptors}", seconds)


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def open_files() -> int:
    """Return the number of descriptors of this process, without pipes: they lead to children that handle texts."""
    found = (f"/proc/self/fd/{entry}" for entry in os.listdir("/proc/self/fd"))
    return sum(not os.readlink(path).startswith("pipe:") for path in found if os.path.lexists(path))


def until(condition: Callable[[], bool], words: Callable[[], str], seconds: float = WAIT_SECONDS) -> None:
    """Wait for a condition. Raises AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, words()
        time.sleep(0.01)
