"""Copies of the template process are what real processes are: to themselves, to their parent and in /proc."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM

from ..support import template_process
from ..support.many_ranks import is_stopped, until
from ..support.template_process import SWITCH

PROBE = """
import atexit, json, logging, os, resource, signal, sys, threading
import numpy, torch
atexit.register(lambda: print("at exit", flush=True))
print(json.dumps({
    "words": [sys.argv, sys.orig_argv], "path": sys.path, "folder": os.getcwd(), "variables": dict(os.environ),
    "arguments": open("/proc/self/cmdline").read().rstrip("\\0"),
    "environment": sorted(open("/proc/self/environ").read().strip("\\0").split("\\0")),
    "name": open("/proc/self/comm").read(), "parent": os.getppid(), "main": vars(sys.modules["__main__"]) is globals(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()], "files": os.listdir("/proc/self/fd"),
    "signals": [str(signal.getsignal(number)) for number in signal.valid_signals() if number not in (9, 19)],
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "umask": os.umask(0o22), "nice": os.nice(0),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "logging": [logging.root.level, len(logging.root.handlers)],
    "streams": [[one.encoding, one.errors, one.line_buffering, one.seekable(), one.fileno(), one.mode]
        for one in (sys.stdin, sys.stdout, sys.stderr)],
    "threads": [threading.active_count(), torch.get_num_threads()], "seed": torch.initial_seed(),
    "first": threading.main_thread() is threading.current_thread(),
    "stdin": sys.stdin.readline(), "given": os.read(int(sys.argv[1]), 9).decode(),
}))
print(float(torch.ones(400, 400).mm(torch.ones(400, 400)).sum()), len(numpy.ones(3)))
sys.exit(7)
"""


def run(*words: str, folder: Path, read: int, **variables: str) -> tuple[int, str, str]:
    """Start a module that reads a line and a descriptor; return its exit code and what it prints."""
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"} | variables
    process = template_process.start(
        words,
        env=environment,
        cwd=folder,
        pass_fds=(read,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    out, err = process.communicate("a line\n", timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("form", ["-P -m", "-m", "-c", "script"])
def test_a_copy_is_what_a_real_process_is(form: str, tmp_path: Path) -> None:
    script = tmp_path / "probe_of_processes.py"
    script.write_text(PROBE)
    path = os.pathsep.join([*([str(tmp_path)] if form == "-P -m" else []), str(template_process.SOURCE)])
    begin = {"-c": ["-c", PROBE], "script": [str(script)]}.get(form, [*form.split(), "probe_of_processes"])
    seen: list[tuple[Any, ...]] = []
    for switch in ("0", "1"):
        read, write = os.pipe()
        os.write(write, b"given")
        words = [*begin, str(read), "two words"]
        code, out, err = run(*words, folder=tmp_path, read=read, TEMPLATE_PROCESS=switch, PYTHONPATH=path, MARK="x")
        os.close(read)
        os.close(write)
        found, *rest = out.splitlines()
        own = json.loads(found)
        assert own["parent"] == os.getpid() and own["variables"]["MARK"] == "x"
        assert own["variables"].pop(SWITCH) == switch and f"{SWITCH}={switch}" in own["environment"]
        own["environment"].remove(f"{SWITCH}={switch}")
        seen.append((own, code, rest, err))
    (real, *end), (copy, *other) = seen
    copy["files"].remove(str(template_process.HIGH))  # the connection to its template
    assert copy.pop("seed") != real.pop("seed"), "seeds are random"
    for name in real:
        assert copy[name] == real[name], name
    assert other == end == [7, ["64000000.0 3", "at exit"], ""]


def test_a_copy_obeys_signals_and_its_template_ends_with_it() -> None:
    wait = ("-c", "import time; print(1, flush=True); time.sleep(600)")
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        with template_process.start(
            wait, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        ) as copy:
            assert copy.stdout is not None and copy.stdout.readline() == b"1\n"
            (own,) = templates(copy.pid)
            os.kill(copy.pid, signal.SIGSTOP)
            until(lambda pid=copy.pid: is_stopped(pid), lambda: "it is not stopped")
            os.kill(copy.pid, signal.SIGCONT)
            copy.send_signal(number)
            assert copy.wait(60) == -number
            until(lambda pid=own: not is_template(pid), lambda: "its template lives on")


STARTS_ANOTHER = """
import subprocess, sys
from quire.procs import child_process
words = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
with child_process.subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as child:
    print(child.stdout.read().decode().strip())
"""


def test_children_of_a_copy_are_copies() -> None:
    """A core and the ranks of a server, which has the variables of its template."""
    with template_process.start(["-c", STARTS_ANOTHER], stdout=subprocess.PIPE, start_new_session=True) as copy:
        assert copy.stdout is not None and copy.stdout.read() == b"True\n"


def is_template(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return f"({template_process.NAME})" in fields and fields.rpartition(")")[2].split()[0] != "Z"


def templates(parent: int) -> list[int]:
    """Return the templates of a process."""
    names = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and is_template(int(entry))]
    return [pid for pid in names if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(parent)]


@pytest.mark.parametrize(
    "option",
    [{"umask": 0o77}, {"preexec_fn": os.getpid}, {"user": 0}, {"process_group": 0}, {"close_fds": False}],
    ids=str,
)
def test_what_a_copy_cannot_have_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"a copy of the template has no .*{SWITCH}=0"):
        template_process.start(["-c", ""], start_new_session=True, **option)


def test_every_rank_of_an_engine_is_a_copy(engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that the product adds for ranks must not make them start as always: each would import torch."""
    fresh = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def start(self: object, words: list[str], *others: Any) -> None:
        assert template_process.LAST not in words, "a rank is no copy: see ONCE and LATER"
        fresh(self, words, *others)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", start)
    engine(tensor_parallel_size=2)
