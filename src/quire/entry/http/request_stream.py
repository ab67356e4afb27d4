"""The outputs of one request, for one reader.

The stream remembers the prompts that changed, and makes their outputs when the reader takes them. A waiting reader may
set a sink. Outputs go to the sink at once while it is ready; the reader wakes only when the sink is not ready, at the
end, or on an error. This saves a task switch per event. Knows nothing of the core.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Self

from quire.contracts.errors import QueueTimeout, QuireError, RequestFailed
from quire.contracts.output import RequestOutput
from quire.entry.completion import Generation
from quire.entry.front_end import INTERNAL

LOG = logging.getLogger("quire")
FIXES = {
    "deadline": ", its time limit was reached: ask for fewer tokens, or raise the limit (X-Request-Timeout, or "
    "--request-timeout for all requests)"
}
Batch = list[tuple[int, RequestOutput]]  # (prompt index, new output)


class RequestStream:
    """The outputs of all prompts of one request. Iterate it once, and always `close` it.

    generations   `Generation` of each prompt, in the order of the prompts
    num_open      number of prompts that have not finished
    cause         cause for which unfinished prompts were aborted, as metrics name it; ""
    """

    def __init__(self, request_id: str, on_close: Callable[["RequestStream"], None]) -> None:
        self.request_id = request_id
        self.generations: list[Generation] = []
        self.num_open = 0
        self.cause = ""
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
        """Return (prompt index, output) of every prompt that changed since the last call; at least one.

        Outputs that went to the sink are not returned. Raises:
        RequestFailed        a prompt failed by itself
        QueueTimeout         the request reached its time limit before it started
        QuireError           the error that ended the request or the engine
        StopAsyncIteration   all prompts have finished
        and any exception that the sink raised.
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
        """Set a sink: while the reader waits and `ready()` is true, outputs of a step go to `take`, not to the reader.
        The last outputs of a request always go to the reader. An exception of `take` is raised in the reader."""
        self._sink = ready, take

    def mark(self, index: int) -> None:
        """Note that the output of the prompt `index` changed; `tell` delivers it."""
        self._changed[index] = None

    def end_one(self, index: int) -> None:
        """Note that a prompt has finished; `tell` delivers it."""
        self.num_open -= 1
        self.mark(index)

    def tell(self) -> None:
        """Give the outputs that changed since the last call to the sink if it is ready; else wake the reader, which
        takes them itself. Called once per step."""
        waiter, sink = self._waiter, self._sink
        if waiter is None or waiter.done():
            return  # the reader is busy, and checks for changes before it waits again
        if sink is not None and self.num_open and self._error is None and sink[0]():
            try:
                return sink[1](self._batch())
            except Exception as fault:  # fails only this request: the reader raises it
                self._fault = fault
        waiter.set_result(None)

    def fail(self, error: QuireError) -> None:
        """End the stream with an error. Outputs that came before are still delivered."""
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Abort the unfinished prompts; idempotent."""
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
            self.cause = INTERNAL
            raise failure(self.request_id, INTERNAL) from error
        for completion in output.outputs:
            if completion.finish_reason == "error":
                if completion.stop_reason == "deadline" and all(g.began is None for g in self.generations):
                    raise not_started(self.request_id, time.monotonic() - generation.metrics.arrival_time)
                raise failure(self.request_id, str(completion.stop_reason), completion.error)
        return output


def not_started(request_id: str, seconds: float) -> QueueTimeout:
    """Return the error of a request that no step has scheduled in the seconds of a limit, of the queue or its own."""
    words = f"request {request_id} waited {round(seconds, 2):g} s and did not start"
    return QueueTimeout(f"{words}, because the server is busy: try again later.")


def failure(request_id: str, code: str, words: str | None = None) -> RequestFailed:
    """Return the error of a failed request. Its message is `words`, or is made from the code."""
    return RequestFailed(words or f"request {request_id} failed: {code}{FIXES.get(code, '')}.", code=code)
