"""Ctrl-C before a command can deal with it: while modules are imported it ends the process at once.

An exception is of no use there: in the middle of an import it is lost in a library's own handling of errors, or leaves
a module that is half imported. Imports next to nothing, because every command begins here.
"""

import os
import signal

INTERRUPTED = 130  # as in `exit_codes`
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


def leave_on_interrupt() -> None:
    """From now on Ctrl-C ends the process with exit code 130, without a word. Not where it is ignored (nohup)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again; nothing when `leave_on_interrupt` was not in force."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    if os.isatty(2):
        os.write(2, SHOW_CURSOR + b"\n")
    os._exit(INTERRUPTED)
