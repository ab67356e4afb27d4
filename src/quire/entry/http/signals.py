"""SIGTERM and Ctrl-C as events: the first asks to finish, the second to end now."""

import asyncio
import signal

from quire.entry.exit_codes import DONE, INTERRUPTED

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequests:
    """`with`: takes the signals while inside; use it in the main thread, with a running loop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._last = signal.SIGTERM

    @property
    def name(self) -> str:
        """What a human calls the last signal."""
        return "Ctrl-C" if self._last is signal.SIGINT else "SIGTERM"

    @property
    def code(self) -> int:
        """The exit code of whoever ends at once because of the last signal."""
        return INTERRUPTED if self._last is signal.SIGINT else DONE

    def __enter__(self) -> "StopRequests":
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)
        return self

    def __exit__(self, *error: object) -> None:
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        self._last = number
        (self.second if self.first.is_set() else self.first).set()
