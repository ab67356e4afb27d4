"""Returns the memory of requests with long texts to the system, soon after they end.

The tokenizer takes 150 bytes per byte of text for a while, and bodies, prompts and answers are copied several times.
The C library keeps freed memory in the process. After each MUCH bytes of requests we make it return this memory.
"""

import asyncio
import gc

from quire.observe.process import return_memory

MUCH = 2**20  # bytes of requests
DELAY = 1.0  # seconds until memory is returned: an ended request has freed its objects by then


class FreedMemory:
    """Counter of the bytes of long requests. After each `MUCH` bytes, a thread returns freed memory (malloc_trim)."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def count(self, num_bytes: int) -> None:
        """Add the bytes of a request whose memory is free now, or will be free within DELAY seconds."""
        self._num_bytes += num_bytes
        if self._num_bytes >= MUCH and self._timer is None:
            self._num_bytes, loop = 0, asyncio.get_running_loop()
            self._timer = loop.call_later(DELAY, self._return, loop)

    def _return(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        gc.collect()  # the futures of work in threads form cycles that hold the text
        loop.run_in_executor(None, return_memory)
