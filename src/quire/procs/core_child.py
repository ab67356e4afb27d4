"""The core's process, seen from its parent: started, watched, killed and reaped.

The pipe to its standard input carries its configuration and stays open: the end of it tells the child that the parent
is gone, however that came.
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
    """A core in a process of its own, in a session of its own: a Ctrl-C in the terminal does not reach it.

    module   what the process runs: it reads its `CoreStart` from standard input
    """

    def __init__(self, start: CoreStart, module: str) -> None:
        # -P: a folder that happens to hold a torch.py must not be imported because the server was started there
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=2, start_new_session=True
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead already, and that will be noticed
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.flush()

    def ended(self) -> str | None:
        """How it ended, as the rest of a sentence; None while it runs. Reaps it."""
        code = self._process.poll()
        if code is None:
            return None
        if code >= 0:
            return f"exited with code {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def stopped(self) -> bool:
        """Whether it is stopped by a signal (T) or a debugger (t) and does nothing."""
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
        """SIGKILL, which also ends a stopped process; idempotent."""
        if self._process.poll() is None:
            self._process.kill()

    def release(self) -> None:
        """Wait for its end, after `kill` or a `Stop`, and close the pipe."""
        assert self._process.stdin is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
