"""Signals to a server: to stop, to read its files again, and to log more or less.

SIGTERM, SIGINT   finish the running requests, then end; again: end now
SIGHUP            read the API keys and the certificate again; without such files, on a terminal, it ends the process
SIGUSR1, SIGUSR2  log at the level debug; at the level of --log-level

Those of the last two lines that come while the process starts wait for `OperatorSignals`, see `procs/held_signals.py`.

Knows event loops, and nothing of what a signal does.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Sequence

from quire.contracts.errors import QuireError
from quire.entry.exit_codes import DONE, INTERRUPTED
from quire.procs.held_signals import release

LOG = logging.getLogger("quire")
STOP = (signal.SIGTERM, signal.SIGINT)


class StopRequests:
    """`with` block in which SIGTERM and Ctrl-C set events: `first` means finish, `second` means end now.
    Use it in the main thread, with a running event loop.

    further   True: the first HTTP process decides. Then any number of SIGTERM means finish, since a service manager
              sends it to every process, and so does the first one. SIGINT means end now
    """

    def __init__(self, *, further: bool = False) -> None:
        self._further = further
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._last = signal.SIGTERM

    @property
    def name(self) -> str:
        """Name of the last signal, for messages."""
        return "Ctrl-C" if self._last is signal.SIGINT else "SIGTERM"

    @property
    def code(self) -> int:
        """Exit code of a process that ends at once because of the last signal."""
        return INTERRUPTED if self._last is signal.SIGINT else DONE

    def __enter__(self) -> "StopRequests":
        for number in STOP:
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)
        return self

    def __exit__(self, *error: object) -> None:
        for number in STOP:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        self._last = number
        again = number is signal.SIGINT if self._further else self.first.is_set()
        self.first.set()
        if again:
            self.second.set()


class OperatorSignals:
    """`with` block in which an operator may send SIGHUP, SIGUSR1 and SIGUSR2. Use it in the main thread, with a running
    event loop.

    reload   functions that read a file again, and return a sentence for the operator; they raise a `QuireError` when
             they cannot use it, which the log has as an error
    others   passes a signal on to the other HTTP processes
    tell     shows a sentence to the operator
    level    level of the log that SIGUSR2 returns to
    """

    def __init__(
        self,
        reload: Sequence[Callable[[], str]],
        others: Callable[[signal.Signals], None],
        tell: Callable[[str], None],
        level: int,
    ) -> None:
        self._reload, self._others, self._tell = reload, others, tell
        self._levels = {signal.SIGUSR1: logging.DEBUG, signal.SIGUSR2: level}
        hangs_up = not reload and sys.stderr.isatty()  # the terminal goes, and the server with it
        self._numbers = [*self._levels, *([] if hangs_up else [signal.SIGHUP])]

    def __enter__(self) -> None:
        for number in self._numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)
        release()

    def __exit__(self, *error: object) -> None:
        for number in self._numbers:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        self._others(number)
        if number is signal.SIGHUP:
            for read in self._reload:  # in a thread: a file of 10,000 keys takes half a second
                done = asyncio.get_running_loop().run_in_executor(None, read)
                done.add_done_callback(self._told)
            if not self._reload:
                self._tell("SIGHUP: this server has no files to read again (--api-key-file, --ssl-certfile).")
            return
        LOG.setLevel(self._levels[number])
        self._tell(f"{number.name}: the level of the log is {logging.getLevelName(LOG.level).lower()}.")

    def _told(self, done: "asyncio.Future[str]") -> None:
        """Tell the operator what has come of a file."""
        try:
            self._tell(done.result())
        except QuireError as error:
            LOG.error("%s", error)
