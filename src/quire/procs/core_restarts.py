"""Restarts of a dead engine core: when the next one may start, and the end of what the dead one has left.

Knows processes, times and the files of a server's folder. Knows nothing of sockets.
"""

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path

from quire.procs.child_process import PROC

LOG = logging.getLogger("quire")
FIRST_WAIT = 0.5  # seconds from the end of a core to the start of the next; it doubles with each end in a row
CALM_SECONDS = 10.0  # of service, after which an end is the first in a row
MOST_WAIT = 30.0
SERVED_SECONDS = 600.0  # of service, after which earlier ends are forgotten
ASLEEP = "asleep"  # file of the sockets' folder: the engine sleeps


class CoreRestarts:
    """The ends of a server's cores.

    most    restarts without `SERVED_SECONDS` of service between them; 0: none
    count   restarts since the engine has served for so long
    lost    monotonic time of the end of the last core; None: the engine serves
    """

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self.lost: float | None = None
        self._served: float | None = None
        self._row = 0  # ends without `CALM_SECONDS` of service between them

    def served(self, now: float) -> None:
        """Note that the engine serves, and tell the operator if it does so again. `now`: monotonic time"""
        if self.lost is not None and self.count:
            seconds, left = now - self.lost, self.most - self.count
            LOG.info("The engine serves again after %.1f s; %d of %d restarts are left.", seconds, left, self.most)
        self._served, self.lost = now, None

    def ended(self, now: float) -> float | None:
        """Note the end of a core, also of one that has not served. Return the seconds to wait before the next core
        starts; None: there were too many."""
        served = 0.0 if self._served is None else now - self._served
        self.count = 0 if served >= SERVED_SECONDS else self.count
        self._row = 0 if served >= CALM_SECONDS else self._row
        self._served, self.lost = None, now if self.lost is None else self.lost
        self.count += 1
        self._row += 1
        return min(MOST_WAIT, FIRST_WAIT * 2 ** (self._row - 1)) if self.count <= self.most else None


class Offspring:
    """The processes that a process has started, such as the ranks of a core. They may outlive it for a moment, with the
    memory of a device or a port in their hands. Without /proc it finds none."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}  # process id -> time of its start, since ids are used again

    def look(self, pid: int) -> None:
        """Note the processes that `pid` has started, and that run."""
        for tasks in (PROC / str(pid) / "task").glob("*/children"):
            with suppress(OSError):  # the thread has ended
                for child in map(int, tasks.read_text().split()):
                    self._found.setdefault(child, _state(child)[1])

    def left(self) -> list[int]:
        """Return those that still run. A server that is process 1 reaps them."""
        left = []
        for pid, began in self._found.items():
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            state, since = _state(pid)
            if since == began and state not in ("", "Z", "X"):
                left.append(pid)
        return left

    def kill(self) -> None:
        """Send SIGKILL to those that still run."""
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> tuple[str, str]:
    """Return the state of a process, and the time of its start; ("", ""): it is gone."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def note_sleep(folder: str, *, asleep: bool) -> None:
    """Note in the folder of a server that its engine sleeps, or is awake. A core that dies asleep stays away, since its
    memory is somebody else's, until the engine is woken."""
    file = Path(folder, ASLEEP)
    file.touch() if asleep else file.unlink(missing_ok=True)


def sleeps(folder: str) -> bool:
    """Return True if the engine of the server with this folder was put to sleep."""
    return Path(folder, ASLEEP).exists()
