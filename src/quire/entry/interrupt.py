"""Ctrl-C that waits: a step of the engine is done as a whole or not at all."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """While this is open the first Ctrl-C only sets the event; a second one raises KeyboardInterrupt.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """
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
    """Ctrl-C takes effect after the block, with whatever handler was there before."""
    with interruptible() as asked:
        yield
    if asked.is_set():
        signal.raise_signal(signal.SIGINT)
