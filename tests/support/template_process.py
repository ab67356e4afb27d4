"""Python processes that begin with torch and Quire imported: copies of a template process, made with clone(2).

Importing torch takes 2 s of processor time, and a test's server or engine has up to nine processes. A template process
has done the imports and nothing else: it has one thread, and has run no operation of torch. It clones itself with
CLONE_PARENT, so a copy is a child of the process that asked, as one of `subprocess` is: `Popen` here differs from its
base only in the start. A copy that starts processes itself, such as a server, has a template of its own, which it made
before anything else happened in it.

    with quick_starts():                       # engines of this process start their ranks so
        LLM(tensor_parallel_size=2)
    start(["-m", "quire", "serve"], ...)       # a server, its core and its ranks

A copy gets arguments, environment, folder, descriptors, session and default signals as a new process does, and
/proc/PID/cmdline and environ show them. Other options of `Popen`, such as umask, are refused (`IGNORED`). A process
starts as always where a copy could not be the same: where variables that are read once differ (`ONCE`), where
PYTHONPATH has a sitecustomize.py, on another system than Linux, and with TEMPLATE_PROCESS=0. Some tests ask for that,
so that the product's own start is tested, too.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SWITCH = "TEMPLATE_PROCESS"  # 0: no copies
NAME = "quire-template"  # of a template in `ps`; tests that list children leave it out
SOURCE = Path(__file__).resolve().parents[2] / "src"
ONCE = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_", "PYTHON", "TORCH", "PYTORCH", "TRITON")
LATER = {  # variables of these kinds that are read when they are needed
    "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR", "TORCH_GLOO_LAZY_INIT", "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "TRITON_CACHE_DIR",
}  # fmt: skip
IMPORTS: tuple[str, ...] = (
    "torch", "torch._dynamo", "torch.distributed", "numpy", "uvicorn", "uvicorn.lifespan.off", "httptools",
    "quire.assemble.cpu", "quire.assemble.engine", "quire.assemble.rank_child", "quire.assemble.ranks",
    "quire.engine.mock_core", "quire.entry.cli.main", "quire.entry.cli.serve", "quire.entry.http.app",
    "quire.entry.http.console", "quire.entry.http.protocol", "quire.entry.http.server", "quire.kernels.attention.cpu",
    "quire.kernels.attention.native", "quire.kernels.heads.native", "quire.kernels.linear.native",
    "quire.kernels.norm.native", "quire.kernels.sampling.edits", "quire.kernels.sampling.ref", "quire.kernels.step.ref",
    "quire.models.qwen3", "quire.procs.core_server", "quire.kvnet.event_publisher", "quire.procs.parent",
    "quire.ranks.server",
)  # fmt: skip
HIGH = 700  # descriptors of templates begin here; those of tests are lower
ROOM = 1 << 15  # bytes that a template keeps in its arguments, and in its environment, for those of its copies
REAL = subprocess
LENGTH = struct.Struct("<I")
CLONE_PARENT, SYS_CLONE = 0x00008000, {"x86_64": 56, "aarch64": 220}
PR_SET_NAME = 15
IGNORED = {  # options of `subprocess.Popen` that no copy can have, and their defaults
    "preexec_fn": None, "close_fds": True, "startupinfo": None, "creationflags": 0, "shell": False,
    "restore_signals": True, "gid": None, "gids": None, "uid": None, "umask": -1, "process_group": -1,
}  # fmt: skip
LAST = "quire.ranks.process"  # starts no processes itself


class Template:
    """The connection to a template process, which is a child of this process."""

    def __init__(self, end: socket.socket, variables: dict[str, str], process: object = None) -> None:
        self.end, self.variables, self.process = end, variables, process
        self.lock = threading.Lock()

    def clone(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the process id of a copy that runs `request` with these descriptors."""
        data = json.dumps(request).encode()
        with self.lock:
            socket.send_fds(self.end, [LENGTH.pack(len(data))], list(descriptors))
            self.end.sendall(data)
            (pid,) = LENGTH.unpack(_read(self.end, LENGTH.size))
        if not pid:
            raise OSError("the template process made no copy")
        return int(pid)


template: Template | None = None  # of this copy
templates: dict[tuple[str, ...], Template] = {}  # of a process that is no copy, by their imports
imports = IMPORTS  # of the template that is used now
starting = threading.Lock()


def start(words: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start `python WORDS`, as `subprocess.Popen` does: as a copy where that can be."""
    return Popen([sys.executable, *words], **options)


@contextlib.contextmanager
def quick_starts(names: tuple[str, ...] = IMPORTS) -> Iterator[None]:
    """Let engines of this process start their children as copies of a template with these imports."""
    global imports
    child_process: Any = importlib.import_module("quire.procs.child_process")
    before = child_process.subprocess, imports
    imports = names
    ready()
    child_process.subprocess = _stand_in()
    try:
        yield
    finally:
        child_process.subprocess, imports = before


def _stand_in() -> Any:
    """The names of the module `subprocess`, with `Popen` of this module."""
    return types.SimpleNamespace(**vars(REAL) | {"Popen": Popen})


class Popen(REAL.Popen):  # type: ignore[type-arg]
    """A child process of Python that is a copy of the template where it can be."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        names = (
            "executable",
            "preexec_fn",
            "close_fds",
            "pass_fds",
            "cwd",
            "env",
            "startupinfo",
            "creationflags",
            "shell",
            "p2cread",
            "p2cwrite",
            "c2pread",
            "c2pwrite",
            "errread",
            "errwrite",
            "restore_signals",
            "gid",
            "gids",
            "uid",
            "umask",
            "start_new_session",
            "process_group",
        )
        given = dict(zip(names, others, strict=True))
        variables = dict(os.environ if given["env"] is None else given["env"])
        plain = args[0] == sys.executable and given["start_new_session"]
        found = ready() if plain else None
        if found is None or not fits(found, variables):
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        if ignored := [name for name, default in IGNORED.items() if given[name] != default]:
            raise ValueError(f"a copy of the template has no {', '.join(ignored)}: set {SWITCH}=0 for this process")
        standard = [
            given[name] if given[name] != -1 else i for i, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
        ]
        request = {
            "words": list(map(os.fspath, args)),
            "variables": variables,
            "folder": os.fspath(given["cwd"] or os.getcwd()),
            "numbers": [0, 1, 2, *given["pass_fds"]],
        }
        self.pid = found.clone(request, [*standard, *given["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*others[9:15])  # type: ignore[attr-defined]


def fits(found: Template, variables: Mapping[str, str]) -> bool:
    """True if a copy can have these variables: those that are read once are the template's."""
    if variables.get(SWITCH) == "0":
        return False
    if any((Path(folder) / "sitecustomize.py").exists() for folder in variables.get("PYTHONPATH", "").split(":")):
        return False
    return once(variables) == once(found.variables)


def once(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that Python and libraries read once, when they are loaded."""
    return {name: text for name, text in variables.items() if name.startswith(ONCE) and name not in LATER}


def ready() -> Template | None:
    """Return the template of this process, started at need; None where there can be none."""
    with starting:
        if template is not None or sys.platform != "linux" or os.uname().machine not in SYS_CLONE:
            return template
        if imports not in templates and os.environ.get(SWITCH) != "0":
            templates[imports] = _start_template()
        return templates.get(imports)


def _start_template() -> Template:
    ours, theirs = socket.socketpair()
    variables = {name: text for name, text in os.environ.items() if not name.startswith("MANY_RANKS_")}
    with theirs:
        room = {"ROOM_FOR_VARIABLES": "-" * ROOM, "PYTHONPATH": str(SOURCE), "OPENBLAS_NUM_THREADS": "1"}
        own = ",".join(room.keys() - variables.keys())  # are not of the copies
        words = [sys.executable, "-P", __file__, str(theirs.fileno()), ",".join(imports), own, "-" * ROOM]
        process = REAL.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(theirs.fileno(),),
            env=variables | room,
            start_new_session=True,
        )
    end = _high(ours)
    if _read(end, 1) != b"!":
        raise OSError(f"the template process does not start: set {SWITCH}=0 to do without it")
    return Template(end, variables, process)


# ---- the template process


def main() -> None:
    """Import everything, then make copies until the asking process ends. A copy runs its module."""
    end = _high(socket.socket(fileno=int(sys.argv[1])))
    names = os.environ.keys() - set(sys.argv[3].split(","))
    variables = {name: os.environ[name] for name in names}
    for name in sys.argv[2].split(","):
        importlib.import_module(name)
    child_process: Any = importlib.import_module("quire.procs.child_process")
    child_process.subprocess = _stand_in()
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, "a template has one thread"
    gc.collect()
    gc.freeze()  # a collection would write to all objects, and so copy their memory
    _set_name(NAME)
    end.sendall(b"!")
    while True:
        request, descriptors = make_copies(end)
        _place(descriptors, request["numbers"])
        os.setsid()
        if request["words"][-3:-2] == [LAST] or (own := own_template(variables)) is None:
            break
        end = own
    become(request)


def make_copies(end: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Serve requests until the other end is closed. In a copy, return its request and its descriptors."""
    python = ctypes.PyDLL(None)
    while True:
        header, descriptors, _, _ = socket.recv_fds(end, LENGTH.size, 64)
        if not header:
            os._exit(0)
        request = json.loads(_read(end, *LENGTH.unpack(header)))
        python.PyOS_BeforeFork()
        pid = python.syscall(SYS_CLONE[os.uname().machine], CLONE_PARENT | signal.SIGCHLD, None, None, None, None)
        if pid == 0:
            python.PyOS_AfterFork_Child()
            end.close()
            return request, descriptors
        python.PyOS_AfterFork_Parent()
        for descriptor in descriptors:
            os.close(descriptor)
        end.sendall(LENGTH.pack(max(0, pid)))


def own_template(variables: dict[str, str]) -> socket.socket | None:
    """Give this copy a template: a child that has done nothing else. Return its end there, None in this copy."""
    global template
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        template = Template(_high(ours), variables)
        return None
    end = _high(theirs)
    ours.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    _place([nothing] * 3 + [end.fileno()], [0, 1, 2, end.fileno()])
    os.setsid()
    return end


def become(request: dict[str, Any]) -> None:
    """Make this copy what a new process with the words of the request is, then run its module."""
    words, variables = request["words"], request["variables"]
    safe = words[1] == "-P"
    kind, *arguments = words[2:] if safe else words[1:]
    _set_name(os.path.basename(sys.executable))
    os.chdir(request["folder"])
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    library = [path for path in sys.path if path not in known]
    added = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"-m": request["folder"], "-c": ""}.get(kind, os.path.dirname(kind))
    sys.path[:] = [*([] if safe else [first]), *added, *library]
    importlib.invalidate_caches()
    os.environ.clear()
    os.environ.update(variables)
    _show(words, variables)
    _open_streams()
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    sys.orig_argv[:] = words
    sys.modules["template_process"] = sys.modules["__main__"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        sys.argv[:] = ["-m", *arguments[1:]]
        _run_module(arguments[0])
    elif kind == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = [kind, *arguments]
        main.__file__ = kind
        exec(compile(Path(kind).read_text(), kind, "exec"), vars(main))


def _run_module(name: str) -> None:
    try:
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)  # without the end of each module, which takes 0.4 s here


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers, inherited by children as a new process's are, and close all others."""
    least = max(numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, least) for descriptor in descriptors]
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=True)
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in numbers:
            with contextlib.suppress(OSError):  # that of the listing is closed already
                os.close(int(entry))


def _show(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Write arguments and variables where /proc/PID/cmdline and environ show them. No pointer leads there any more."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last, first_variable, last_variable = map(int, fields[45:49])
    texts = [f"{name}={text}" for name, text in variables.items()]
    for shown, begin, end in ((words, first, last), (texts, first_variable, last_variable)):
        data = b"".join(os.fsencode(text) + b"\0" for text in shown)[: end - begin - 1]
        ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def _open_streams() -> None:
    """Open standard input, output and error as Python does: those of the template were other files."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        former, mode = getattr(sys, name), "w" if number else "r"
        made: Any = open(number, f"{mode}b", 0 if former.write_through else -1, closefd=False)
        lines = not former.write_through and (name == "stderr" or os.isatty(number))
        made = io.TextIOWrapper(
            made, former.encoding, former.errors, line_buffering=lines, write_through=former.write_through
        )
        made.mode = mode
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)


def _set_name(name: str) -> None:
    ctypes.PyDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def _high(end: socket.socket) -> socket.socket:
    """Return a socket with a number that no test uses, and close this one."""
    with end:
        return socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, HIGH))


def _read(end: socket.socket, count: int) -> bytes:
    """Return so many bytes; fewer at the end."""
    data = b""
    while len(data) < count and (more := end.recv(count - len(data))):
        data += more
    return data


if __name__ == "__main__":
    main()
