"""The outputs of one request, waited for by one reader.

Knows what has changed since the reader last looked, and makes outputs only then. Knows nothing of the core.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Self

from quire.contracts.errors import QuireError, RequestFailed
from quire.contracts.output import RequestOutput
from quire.entry.completion import Generation
from quire.entry.front import INTERNAL

LOG = logging.getLogger("quire")


class RequestStream:
    """All prompts of one request. Iterate it once, and `close` it in the end, whatever happens.

    generations   by prompt index;  num_open  prompts that have not finished
    """

    def __init__(self, request_id: str, on_close: Callable[["RequestStream"], None]) -> None:
        self.request_id = request_id
        self.generations: list[Generation] = []
        self.num_open = 0
        self._on_close = on_close
        self._changed: dict[int, None] = {}  # prompt indices, in order
        self._error: QuireError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[tuple[int, RequestOutput]]:
        """(prompt index, output) of everything that came since the last call, at least one.

        Raises `RequestFailed` when a prompt failed by itself, the `QuireError` that ended the request or the engine,
        `StopAsyncIteration` after the end of all prompts.
        """
        while not self._changed:
            if self._error is not None:
                self.close()
                raise self._error
            if not self.num_open or self._closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        changed, self._changed = self._changed, {}
        try:
            return [(i, self._output(i)) for i in changed]
        except RequestFailed:
            self.close()
            raise

    def mark(self, index: int) -> None:
        """There is something new of a prompt."""
        self._changed[index] = None
        self._wake()

    def end_one(self, index: int) -> None:
        """A prompt has finished."""
        self.num_open -= 1
        self.mark(index)

    def fail(self, error: QuireError) -> None:
        """Nothing more will come; what came before is still handed out."""
        self._error = error
        self._wake()

    def close(self) -> None:
        """End what still runs; idempotent."""
        if not self._closed:
            self._closed = True
            self._on_close(self)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _output(self, index: int) -> RequestOutput:
        generation = self.generations[index]
        try:
            output = generation.output()
        except Exception as error:
            LOG.exception("the output of request %s could not be made", self.request_id)
            raise self._failure(INTERNAL) from error
        for completion in output.outputs:
            if completion.finish_reason == "error":
                raise self._failure(str(completion.stop_reason))
        return output

    def _failure(self, code: str) -> RequestFailed:
        return RequestFailed(f"request {self.request_id} failed: {code}.", code=code)
