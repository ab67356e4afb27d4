"""The outputs of one request, waited for by one reader.

Knows what has changed since the reader last looked, and makes outputs only then. A reader that waits may leave a sink:
what comes is put into it at once, as long as it takes anything, and the reader is woken only for what the sink cannot
do (wait, end, fail). That saves a change of tasks per event. Knows nothing of the core.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Self

from quire.contracts.errors import QueueTimeout, QuireError, RequestFailed
from quire.contracts.output import RequestOutput
from quire.entry.completion import Generation
from quire.entry.front import INTERNAL

LOG = logging.getLogger("quire")
FIXES = {"deadline": ", its time was up: ask for fewer tokens, or give it more time (X-Request-Timeout, or for all "
                     "--request-timeout)"}
Batch = list[tuple[int, RequestOutput]]  # (prompt index, what is new)


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
        self._fault: Exception | None = None  # of the sink
        self._sink: tuple[Callable[[], bool], Callable[[Batch], None]] | None = None  # ready, take
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        """(prompt index, output) of everything that came since the last call and did not go into the sink; at least
        one.

        Raises `RequestFailed` when a prompt failed by itself, `QueueTimeout` when its time was up before it began, the
        `QuireError` that ended the request or the engine, what the sink raised, `StopAsyncIteration` after the end of
        all prompts.
        """
        while not self._changed or self._fault is not None:
            if self._fault is not None:
                self.close()
                raise self._fault
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
        try:
            return self._batch()
        except (RequestFailed, QueueTimeout):
            self.close()
            raise

    def pour_into(self, ready: Callable[[], bool], take: Callable[[Batch], None]) -> None:
        """From now on `take` gets outputs that come while the reader waits, all of a step at once and without waiting,
        when it is `ready`; the last ones of a request it never gets. What it raises, the reader gets."""
        self._sink = ready, take

    def mark(self, index: int) -> None:
        """There is something new of a prompt; `tell` hands it on."""
        self._changed[index] = None

    def end_one(self, index: int) -> None:
        """A prompt has finished; `tell` hands it on."""
        self.num_open -= 1
        self.mark(index)

    def tell(self) -> None:
        """Hand on what was marked, once per step."""
        waiter, sink = self._waiter, self._sink
        if waiter is None or waiter.done():
            return  # the reader is at work, and looks again before it waits
        if sink is not None and self.num_open and self._error is None and sink[0]():
            try:
                return sink[1](self._batch())
            except Exception as fault:  # of this request alone, and its reader's to tell
                self._fault = fault
        waiter.set_result(None)

    def fail(self, error: QuireError) -> None:
        """Nothing more will come; what came before is still handed out."""
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """End what still runs; idempotent."""
        if not self._closed:
            self._closed = True
            self._on_close(self)

    def _batch(self) -> Batch:
        changed, self._changed = self._changed, {}
        return [(i, self._output(i)) for i in changed]

    def _output(self, index: int) -> RequestOutput:
        generation = self.generations[index]
        try:
            output = generation.output()
        except Exception as error:
            LOG.exception("the output of request %s could not be made", self.request_id)
            raise failure(self.request_id, INTERNAL) from error
        for completion in output.outputs:
            if completion.finish_reason == "error":
                if completion.stop_reason == "deadline" and all(g.began is None for g in self.generations):
                    raise QueueTimeout(f"request {self.request_id} could not start before its time was up: the server "
                                       "is busy, try again later.")
                raise failure(self.request_id, str(completion.stop_reason), completion.error)
        return output


def failure(request_id: str, code: str, words: str | None = None) -> RequestFailed:
    """Why a request failed by itself: in the engine's words, or in those for the code."""
    return RequestFailed(words or f"request {request_id} failed: {code}{FIXES.get(code, '')}.", code=code)
