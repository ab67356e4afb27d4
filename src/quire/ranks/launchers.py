"""Places for the ranks of an engine, and their start there. `ranks/executor.py` does not know where a rank runs.

A `Launcher` chooses a host and a device for each rank, and starts the processes. `LocalLauncher` starts children of
this process. `Hosts` (`hosts.py`) starts ranks on several hosts.
"""

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from quire.config.env import with_variables
from quire.procs.child_process import ChildProcess
from quire.procs.frames import Frames

PROCESS = "quire.ranks.process"


class Place(NamedTuple):
    """The place of a rank.

    host     index of its host;  device  index of its device there
    folders  of the model and of its drafter on its host; (): as on this one
    address  of its host, by which this process reaches it; "": this host
    """

    host: int
    device: int
    folders: tuple[str, ...] = ()
    address: str = ""

    @property
    def local(self) -> bool:
        """True on this process's host."""
        return not self.address


class RankProcess(Protocol):
    """The process of a rank, on this host or on another one. `ChildProcess` describes the methods."""

    @property
    def pid(self) -> int:
        """Process id on its host."""

    def ended(self) -> str | None:
        """Return the way the process ended; None while it runs."""

    def stopped(self) -> bool:
        """True when a signal (SIGSTOP) or a debugger holds the process."""

    def kill(self) -> None:
        """Send SIGKILL; idempotent. Never waits."""

    def release(self, seconds: float) -> None:
        """Wait at most `seconds` for the process to end, then free its resources. Call `kill` before."""


class StartedRank(NamedTuple):
    """A rank's process and the connection to it. `host`: name of its host for messages; "" for this host."""

    process: RankProcess
    frames: Frames
    host: str = ""


class Launcher(Protocol):
    """Starts the processes of an engine's ranks. The ranks may belong to several `RankProcesses`."""

    def place(self, world: int) -> Sequence[Place]:
        """Return the places of `world` ranks, by their numbers. Raises `ConfigError` if they do not fit."""

    def start(self, numbers: Sequence[int], inherit: Sequence[int] = ()) -> list[StartedRank]:
        """Start the processes of these ranks, or none of them.

        inherit   file descriptors that ranks of this host inherit under the same numbers
        """

    def close(self) -> None:
        """Free what the launcher holds, after its ranks have ended; idempotent. Does nothing unless overridden."""
        return


class LocalLauncher(Launcher):
    """Launcher of ranks that are children of this process, each with a socket pair.

    module   name of a Python module; its `build_rank` builds a rank (see `BuildRank` in `rank_server.py`)
    env      environment variables that the ranks have besides those of this process
    """

    def __init__(self, module: str, env: Mapping[str, str]) -> None:
        self._module, self._env = module, with_variables(env)

    def place(self, world: int) -> list[Place]:
        return [Place(0, number) for number in range(world)]

    def start(self, numbers: Sequence[int], inherit: Sequence[int] = ()) -> list[StartedRank]:
        started: list[StartedRank] = []
        with ExitStack() as failed:
            for _ in numbers:
                ours, theirs = socket.socketpair()
                frames = Frames(ours)
                failed.callback(frames.close)
                with theirs:
                    process = self.run(theirs, inherit)
                failed.callback(process.release)
                failed.callback(process.kill)
                started.append(StartedRank(process, frames))
            failed.pop_all()
        return started

    def run(self, end: socket.socket, inherit: Sequence[int] = ()) -> ChildProcess:
        """Start the process of a rank that talks through the socket `end`. The caller closes its own copy."""
        return ChildProcess(
            PROCESS, arguments=(self._module, str(end.fileno())), descriptors=(end.fileno(), *inherit), env=self._env
        )
