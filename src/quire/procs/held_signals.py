"""Signals of an operator that wait while a process starts: SIGHUP, SIGUSR1, SIGUSR2. They would end it otherwise.

The kernel keeps a blocked signal, and delivers it when `release` is called: then a process reads its files after all.
A process inherits the blocked signals of the thread that starts it, so that none is lost before its first line.
Every server begins here, so this file imports almost nothing.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

HELD = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def hold() -> None:
    """Keep the signals that come to this thread, and to processes that it starts, until `release`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


def release() -> None:
    """Deliver the signals that were kept, and take later ones at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


@contextmanager
def held() -> Iterator[None]:
    """`with` block that starts a process: the process begins with `hold`. This thread takes signals again later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
