"""An engine in a thread of its own, which runs what callers send between two steps and hands them their outputs.

Knows one engine, its front end and inboxes. Knows nothing of event loops, nor of who reads an inbox.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from quire.assemble import Engine
from quire.contracts.errors import EngineClosed, EngineDead, QuireError, RequestFailed
from quire.contracts.output import RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.entry.completion import Generation
from quire.entry.local import front_end
from quire.entry.prompts import Prompt

Inbox = Callable[[RequestOutput | Exception], None]


class EngineThread:
    """`send`, `close` and `engine` may be used in any thread, the rest only in commands that were sent.

    The thread keeps this object alive until `close`, so it must not hold whoever is to be freed without a `close`.
    """

    def __init__(self, engine: Engine) -> None:
        self.front = front_end(engine)
        self.inboxes: dict[int, Inbox] = {}  # by first handle
        self._engine: Engine | None = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: QuireError | None = None  # why no request can be served any more
        self._gate = threading.Lock()  # no command is sent after the thread has ended
        self._thread = threading.Thread(target=self._serve, name="quire-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The parts behind; raises `EngineClosed` after `close`."""
        if self._engine is None:
            raise EngineClosed("this AsyncLLM is closed: make a new one.")
        return self._engine

    def send(self, command: Callable[[], None], *, quiet: bool = False) -> None:
        """Have a command run between two steps; raises why when the thread has ended, unless `quiet`."""
        with self._gate:
            if self._ended is None:
                self._commands.put(command)
            elif not quiet:
                raise self._ended

    def close(self) -> None:
        """End every request, stop the thread and free the engine; idempotent, and can be repeated when interrupted."""
        self._commands.put(None)
        if self._thread is threading.current_thread():
            return  # the garbage collector runs there: the engine is freed when the thread ends
        self._thread.join()
        with self._gate:  # whoever comes first frees it
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    # --- in the thread ------------------------------------------------------------------------------------------

    def start(
        self, prompt: Prompt, params: SamplingParams, deliver: Inbox, started: list[Generation], **options: Any
    ) -> None:
        """Queue one prompt and add it to `started`; its outputs go to `deliver`, and so does what is wrong with it."""
        try:
            if self._ended is not None:
                raise self._ended
            generation, requests = self.front.start(prompt, params, **options)
            started.append(generation)
            for request in requests:
                self.engine.core.add(request, places=len(requests))
        except Exception as error:  # whatever is wrong with one request is its caller's alone
            self.abort(started)
            deliver(error)
            return
        self.inboxes[generation.completions[0].handle] = deliver

    def abort(self, generations: list[Generation]) -> None:
        """End what still runs of these prompts; nothing more is delivered."""
        for generation in generations:
            self.inboxes.pop(generation.completions[0].handle, None)
            for handle in self.front.drop(generation):
                self.engine.core.abort(handle)

    def _serve(self) -> None:
        ended: QuireError = EngineClosed("the engine was closed while this request was running.")
        try:
            while self._take_commands():
                self._step()
        except Exception as fault:  # any fault of a step stops the engine: every caller must hear of it
            ended = EngineDead(f"the engine stopped: {fault}")
        try:
            with self._gate:
                self._ended = ended
                while not self._commands.empty():
                    if (command := self._commands.get()) is not None:
                        command()
        finally:
            for deliver in list(self.inboxes.values()):  # a copy: a closed event loop's inbox removes itself
                deliver(ended)
            self.inboxes.clear()

    def _take_commands(self) -> bool:
        """Run what callers have sent; sleep when there is nothing to do. False when the engine is to stop."""
        while not self._commands.empty() or not self.engine.core.has_work:
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _step(self) -> None:
        outputs, stopped = self.front.apply(self.engine.core.step())
        for handle in stopped:
            self.engine.core.abort(handle)
        for handle, output in outputs:
            deliver = self.inboxes.get(handle)
            if deliver is None:
                continue
            if output.finished:
                del self.inboxes[handle]
            failed = next((c for c in output.outputs if c.finish_reason == "error"), None)
            deliver(output if failed is None
                    else RequestFailed(failed.error or f"request {output.request_id} failed: {failed.stop_reason}.",
                                       code=str(failed.stop_reason)))  # fmt: skip
