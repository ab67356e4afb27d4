"""The servers of the chaos run: backends with restarts, and their router. Starts, kills and times them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from clients import Broken, Connection

PATIENCE = 90.0  # seconds until a server that does not come back is a fault
POLL = 0.02


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that run."""
    found: list[int] = []
    with suppress(OSError):  # the process, or a thread of it, has ended
        for tasks in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (tasks / "children").read_text().split())
    return found


def running(pid: int) -> bool:
    """Return True if a process exists and is no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


class Server:
    """A server as a child process.

    name   for tables
    port   of its HTTP listener, the same after each start
    """

    def __init__(self, name: str, folder: Path, *words: str) -> None:
        self.name, self.port, self.folder = name, free_port(), folder / name
        self.folder.mkdir()
        self._words = words
        self.start()

    def start(self) -> None:
        """Start the process."""
        with (self.folder / "stderr").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire", *self._words, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"TMPDIR": str(self.folder)},
            )

    def roles(self) -> dict[str, int]:
        """Return role -> process id: "http" (or "router"), "core", "front 1", ..."""
        found = {"router" if "route" in self._words else "http": self.process.pid}
        fronts = 0
        for pid in sorted(children(self.process.pid)):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"core_process" in words:
                    found["core"] = pid
                elif b"further_process" in words:
                    fronts += 1
                    found[f"front {fronts}"] = pid
        return found

    async def ready(self, path: str = "/ready") -> bool:
        """Return True if the server takes requests."""
        try:
            connection = await Connection.open(self.port)
            try:
                connection.send(path)
                return (await connection.head())[0] == 200
            finally:
                connection.writer.transport.abort()
        except (Broken, OSError, TimeoutError):
            return False

    async def text(self, path: str) -> str:
        """Return the body of an answer as text."""
        connection = await Connection.open(self.port)
        connection.send(path)
        await connection.head()
        return (await connection._reader.read()).decode()

    async def until_ready(self) -> float:
        """Wait until the server takes requests. Return the seconds; raises TimeoutError."""
        began = time.monotonic()
        async with asyncio.timeout(PATIENCE):
            while not await self.ready():
                await asyncio.sleep(POLL)
        return time.monotonic() - began

    async def kill(self, role: str) -> float:
        """Kill a process, wait until the server is whole again, and return the seconds.

        The whole server ("http") is started again at once, as a service manager does.
        """
        before = self.roles()
        pid = next(pid for name, pid in before.items() if name.startswith(role))
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if role == "http":
            await asyncio.to_thread(self.process.wait)
            while any(map(running, before.values())):  # they end with the first one
                await asyncio.sleep(POLL)
            self.start()
        async with asyncio.timeout(PATIENCE):
            while True:
                now = self.roles()
                whole = now.keys() == before.keys() and pid not in now.values()
                if whole and await self.ready():
                    return time.monotonic() - began
                await asyncio.sleep(POLL)

    def end(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
