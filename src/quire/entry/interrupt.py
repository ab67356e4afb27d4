"""Delayed Ctrl-C, so that it does not interrupt an engine step halfway."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Inside the block the first Ctrl-C only sets the event. A second Ctrl-C raises KeyboardInterrupt.
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
    """Delay Ctrl-C until the end of the block. The handler that was set before then gets the signal."""
    with interruptible() as asked:
        yield
    if asked.is_set():
        signal.raise_signal(signal.SIGINT)
