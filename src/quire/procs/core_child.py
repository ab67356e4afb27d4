"""The process of the engine core, seen from its parent: starts, watches, kills and reaps it.

The pipe to the child's standard input carries the configuration and stays open. When the pipe ends, the child knows
that the parent is gone, for any reason.
"""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from quire.procs.messages import CoreStart

PROC = Path("/proc")
REAP_SECONDS = 5.0


class CoreChild:
    """An engine core in a process and a session of its own: a Ctrl-C in the terminal does not reach the core.

    module   Python module that the process runs; it reads its `CoreStart` from standard input
    """

    def __init__(self, start: CoreStart, module: str) -> None:
        # -P: no imports from the folder where the server was started, which may hold a torch.py
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=2, start_new_session=True
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the child is dead already; `ended` will say so
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.flush()

    def ended(self) -> str | None:
        """Return how the process ended, as the rest of a sentence; None while it runs. Reaps the process."""
        code = self._process.poll()
        if code is None:
            return None
        if code >= 0:
            return f"exited with code {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def stopped(self) -> bool:
        """True when a signal (T) or a debugger (t) has stopped the process."""
        try:
            if PROC.is_dir():
                state = (PROC / str(self.pid) / "stat").read_text().rpartition(")")[2].split()[0]
            else:
                ps = ["ps", "-o", "state=", "-p", str(self.pid)]
                state = subprocess.run(ps, capture_output=True, text=True, timeout=1).stdout.strip()
        except (OSError, IndexError, subprocess.SubprocessError):
            return False  # gone: `ended` says so
        return state[:1] in ("T", "t")

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process; idempotent."""
        if self._process.poll() is None:
            self._process.kill()

    def release(self) -> None:
        """Wait for the end of the process, after `kill` or a `Stop`, and close the pipe."""
        assert self._process.stdin is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
