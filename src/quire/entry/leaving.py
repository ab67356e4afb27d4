"""Ctrl-C while a command imports its modules: it ends the process at once.

A KeyboardInterrupt in the middle of an import may be swallowed by a library, or leave a half-imported module.
Every command begins here, so this file imports almost nothing.
"""

import os
import signal

INTERRUPTED = 130  # as in `exit_codes`
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


def leave_on_interrupt() -> None:
    """Make Ctrl-C end the process at once: exit code 130, no message. Has no effect where it is ignored (nohup)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, after `leave_on_interrupt`."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    if os.isatty(2):
        os.write(2, SHOW_CURSOR + b"\n")
    os._exit(INTERRUPTED)
