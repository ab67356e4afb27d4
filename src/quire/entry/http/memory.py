"""Memory that requests with long texts have used goes back to the system soon after they end.

The tokenizer takes 150 bytes per byte of text for a while, and bodies, prompts and answers are copied several times.
The C library keeps freed memory for the process; after each MUCH bytes of requests it is asked to return it.
"""

import asyncio
import gc

from quire.observe.process import return_memory

MUCH = 2**20  # bytes of requests
DELAY = 1.0  # seconds in which a request that has ended frees what it holds; memory is returned no more often


class FreedMemory:
    """Counts the bytes of requests with long texts on one event loop, and returns memory in a thread."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def count(self, num_bytes: int) -> None:
        """Add the bytes of a request whose memory was freed, or will be within DELAY."""
        self._num_bytes += num_bytes
        if self._num_bytes >= MUCH and self._timer is None:
            self._num_bytes, loop = 0, asyncio.get_running_loop()
            self._timer = loop.call_later(DELAY, self._return, loop)

    def _return(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        gc.collect()  # the futures of a thread's work hold each other, and the text
        loop.run_in_executor(None, return_memory)
