"""A child process of the engine, seen from its parent: starts, watches, kills and reaps it.

The core's process gets its configuration on standard input, which stays open: when it ends, the core knows that the
parent is gone, for any reason. A rank gets a socket of its own, and its standard input is empty.
"""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from quire.procs.held_signals import held

PROC = Path("/proc")
REAP_SECONDS = 5.0


class ChildProcess:
    """A child process that runs a Python module. It has its own session: a Ctrl-C in the terminal does not reach it.
    It begins with an operator's signals held, and ignores or releases them (see `held_signals.py`).

    start         a line for its standard input, which then stays open; None: standard input is empty
    arguments     command-line arguments of the module
    descriptors   file descriptors that the child inherits under the same numbers
    env           the child's environment; None: the environment of this process
    """

    def __init__(
        self,
        module: str,
        start: bytes | None = None,
        *,
        arguments: Sequence[str] = (),
        descriptors: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        # -P: no imports from the folder where the engine was started, which may hold a torch.py
        with held():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.DEVNULL if start is None else subprocess.PIPE,
                stdout=2,
                start_new_session=True,
                pass_fds=descriptors,
                env=env,
            )
        self.pid = self._process.pid
        if start is not None:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):  # the child is dead already; `ended` will say so
                self._process.stdin.write(start + b"\n")
                self._process.stdin.flush()

    def ended(self) -> str | None:
        """Return the way the process ended, such as "exited with code 1"; None while it runs. Reaps the process."""
        code = self._process.poll()
        if code is None:
            return None
        if code >= 0:
            return f"exited with code {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def stopped(self) -> bool:
        """True when a signal (SIGSTOP) or a debugger holds the process: state T or t in `ps`."""
        try:
            if PROC.is_dir():
                state = (PROC / str(self.pid) / "stat").read_text().rpartition(")")[2].split()[0]
            else:
                ps = ["ps", "-o", "state=", "-p", str(self.pid)]
                state = subprocess.run(ps, capture_output=True, text=True, timeout=1).stdout.strip()
        except (OSError, IndexError, subprocess.SubprocessError):
            return False  # gone: `ended` says so
        return state[:1] in ("T", "t")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. SIGTERM asks an HTTP process to end, SIGINT to end without its requests."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process; idempotent."""
        if self._process.poll() is None:
            self._process.kill()

    def release(self, seconds: float = REAP_SECONDS) -> None:
        """Wait at most `seconds` for the process to end, then close its standard input. Call `kill` before."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
