"""A core in a thread of this process, behind the same sockets as one in a process of its own.

For tests that look into the core or make it fail, and for embedding. A thread cannot be killed: one that hangs stays.
"""

import threading

from quire.engine.replicas import Core
from quire.procs.core_server import Build, Send, run_core
from quire.procs.messages import CoreStart, Ready


class CoreThread:
    """A running core; `core` is set once it is built. Has what a `CoreClient` needs of a `ChildProcess`."""

    def __init__(self, start: CoreStart, build: Build) -> None:
        self.pid: int | None = None
        self.core: Core | None = None
        self._build = build
        self._code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(start,), name="quire-core", daemon=True)
        self._thread.start()

    def ended(self) -> str | None:
        """The exception that ended the loop; None while it runs."""
        return None if self._thread.is_alive() else f"ended with code {self._code}"

    def stopped(self) -> bool:
        """A thread is never stopped by a signal."""
        return False

    def kill(self) -> None:
        """Nothing can be done."""

    def release(self) -> None:
        """Wait a moment for the thread."""
        self._thread.join(5)

    def _run(self, start: CoreStart) -> None:
        def build(config: object, send: Send) -> tuple[Core, Ready]:
            core, ready = self._build(start.config, send)
            self.core = core
            return core, ready

        self._code = run_core(start, build)
