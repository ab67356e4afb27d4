"""Processes of tests, forked by one process that has imported PyTorch and Triton: no process imports them again.

    codes, said = Forks(interpreted=True).run(tmp_path / "said", "tests.interpreted.test_comm", [[0, 2], [1, 2]])

This runs `rank_main(0, 2)` and `rank_main(1, 2)` of test_comm.py at the same time. A session has one such process for
interpreted kernels and one for compiled kernels, as Triton asks once in a process which of both it is. On Linux these
processes end with the session, even when it is killed.
"""

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600  # of all processes of a test
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class Forks:
    """The process that forks others. It starts with the first test that needs it."""

    def __init__(self, *, interpreted: bool) -> None:
        self._environment = os.environ | {"TRITON_INTERPRET": str(int(interpreted))}
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, output: Path, module: str, calls: Sequence[Sequence[Any]], name: str = "rank_main"
    ) -> tuple[list[int], str]:
        """Call a function of a module in a process for each list of arguments, all at once.

        Return the exit codes and what the processes wrote. When a process fails, the others are ended.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", str(os.getpid())],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin and self._process.stdout
        job = {"module": module, "name": name, "calls": calls, "output": str(output)}
        self._process.stdin.write(json.dumps(job, default=str) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks others has ended"
        return json.loads(answer), output.read_text()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends. Linux only; elsewhere nothing happens.

    The parent's thread that started this process counts as the parent: tests start processes in their main thread.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def serve() -> None:
    """Run the jobs that come by standard input, one after the other, and print the exit codes of each."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job = json.loads(line)
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        function = imported(job["module"], job["name"], output)
        pids = [fork(function, arguments, output) for arguments in job["calls"]] if function else []
        os.close(output)
        answers.write(json.dumps(wait(pids) if pids else [1]) + "\n")
        answers.flush()


def imported(module: str, name: str, output: int) -> Any:
    """Import a function here, so that the next process has it already. Return None if that fails."""
    try:
        return getattr(importlib.import_module(module), name)
    except BaseException:
        os.write(output, traceback.format_exc().encode())
        return None


def fork(function: Any, arguments: list[Any], output: int) -> int:
    """Start a process that calls a function, and return its id. What it writes goes to the file `output`."""
    sys.stdout.flush()
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        end_with(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int]) -> list[int]:
    """Return the exit codes of processes.

    All are killed when one fails, when they do not end in time, and when the process of the tests has ended.
    """
    codes: dict[int, int] = {}
    deadline, parent = time.monotonic() + SECONDS, os.getppid()
    ended = False
    while len(codes) < len(pids):
        for pid in (pid for pid in pids if pid not in codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if not ended and (any(codes.values()) or time.monotonic() > deadline or os.getppid() != parent):
            ended = True
            for pid in (pid for pid in pids if pid not in codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    import torch  # noqa: F401
    import triton  # noqa: F401

    serve()
