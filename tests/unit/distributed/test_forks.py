"""Processes of tests end with the session that started them, even when it is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ...support.forks import ROOT, Forks

SESSION = """
import sys
from pathlib import Path
from tests.support.forks import Forks
Forks(interpreted=True).run(Path(sys.argv[1]) / "said", "tests.unit.distributed.test_forks", [[sys.argv[1]]], "sleep")
"""


def sleep(folder: str) -> None:
    """Write down the ids of this process and of the process that forked it, then wait."""
    written = Path(folder) / "written"
    written.write_text(f"{os.getppid()} {os.getpid()}")
    written.rename(Path(folder) / "pids")
    time.sleep(60)


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # an ended process whose new parent has not asked for its exit code


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not end a child with its parent")
@pytest.mark.parametrize("killed", ["session", "server"])
def test_processes_end_with_their_parent(killed: str, tmp_path: Path) -> None:
    session = subprocess.Popen([sys.executable, "-c", SESSION, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL)
    pids: list[int] = []
    try:
        assert wait_until((tmp_path / "pids").exists, 120)
        pids += map(int, (tmp_path / "pids").read_text().split())
        os.kill(session.pid if killed == "session" else pids[0], signal.SIGKILL)
        session.wait(60)
        assert wait_until(lambda: not any(map(lives, pids)), 20)
    finally:
        session.kill()
        session.wait()
        for pid in filter(lives, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_processes_live_while_their_parent_does(forks: Forks, tmp_path: Path) -> None:
    assert forks.run(tmp_path / "said", "time", [[0.1], [0.1]], "sleep") == ([0, 0], "")
