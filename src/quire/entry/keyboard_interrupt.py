"""Ctrl-C: it ends a command at once while modules are imported, and waits for the end of an engine step later.

A KeyboardInterrupt in the middle of an import may be swallowed by a library, or leave a half-imported module.
Every command begins here, so this file imports almost nothing.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # as in `exit_codes`
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


def leave_on_interrupt() -> None:
    """Make Ctrl-C end the process at once: exit code 130, no message. Has no effect where Ctrl-C is ignored (nohup)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, after `leave_on_interrupt`."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """`with` block that yields an event. The first Ctrl-C only sets the event; a second one raises KeyboardInterrupt.
    Has no effect outside the main thread, where Python delivers no signals."""
    asked = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield asked
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the `with` block. Then the handler from before the block gets the signal."""
    with interruptible() as asked:
        yield
    if asked.is_set():
        signal.raise_signal(signal.SIGINT)


def _leave(number: int, frame: object) -> None:
    if os.isatty(2):
        os.write(2, SHOW_CURSOR + b"\n")
    os._exit(INTERRUPTED)
