"""An engine in its own thread. Between two steps it runs the commands that callers sent, and delivers their outputs.

Knows one engine, its front end and the callers' inboxes. Knows nothing of event loops or of the readers of an inbox.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from quire.assemble.engine import Engine
from quire.contracts.errors import EngineClosed, EngineDead, QuireError, RequestFailed
from quire.contracts.output import RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.entry.completion import Generation
from quire.entry.local import front_end
from quire.entry.prompts import Prompt

Inbox = Callable[[RequestOutput | Exception], None]


class EngineThread:
    """A thread that steps one engine and serves its callers. Any thread may use `send`, `close` and `engine`. The other
    methods are for commands given to `send`. The thread keeps this object alive until `close`. So this object must not
    refer to an owner (`AsyncLLM`) that may be garbage-collected without `close`."""

    def __init__(self, engine: Engine) -> None:
        self.front = front_end(engine)
        self.inboxes: dict[int, Inbox] = {}  # by first handle
        self._engine: Engine | None = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: QuireError | None = None  # set when the thread has ended: the error of every later request
        self._gate = threading.Lock()  # makes sure that no command is queued after the thread has ended
        self._thread = threading.Thread(target=self._serve, name="quire-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine. Raises `EngineClosed` after `close`."""
        if self._engine is None:
            raise EngineClosed("this AsyncLLM is closed: make a new one.")
        return self._engine

    def send(self, command: Callable[[], None], *, quiet: bool = False) -> None:
        """Queue a command, which the thread runs between two steps. Raises if the thread has ended, unless `quiet`."""
        with self._gate:
            if self._ended is None:
                self._commands.put(command)
            elif not quiet:
                raise self._ended

    def close(self) -> None:
        """End every request, stop the thread and free the engine. Idempotent; an interrupted call can be repeated."""
        self._commands.put(None)
        if self._thread is threading.current_thread():
            return  # called by the garbage collector in this thread: the engine is freed when the thread ends
        self._thread.join()
        with self._gate:  # of several callers, the first frees the engine
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    # --- in the thread ------------------------------------------------------------------------------------------

    def start(
        self, prompt: Prompt, params: SamplingParams, deliver: Inbox, started: list[Generation], **options: Any
    ) -> None:
        """Add the requests of a prompt to the engine, and its `Generation` to `started`. `deliver` gets the outputs or
        the error. After an error, all of `started` is aborted. `options`: of `FrontEnd.start`."""
        try:
            if self._ended is not None:
                raise self._ended
            generation, requests = self.front.start(prompt, params, **options)
            started.append(generation)
            for request in requests:
                self.engine.core.add(request, places=len(requests))
        except Exception as error:  # only this request fails
            self.abort(started)
            deliver(error)
            return
        self.inboxes[generation.completions[0].handle] = deliver

    def abort(self, generations: list[Generation]) -> None:
        """Abort the unfinished completions of these prompts. Nothing more is delivered for them."""
        for generation in generations:
            self.inboxes.pop(generation.completions[0].handle, None)
            for handle in self.front.drop(generation):
                self.engine.core.abort(handle)

    def _serve(self) -> None:
        ended: QuireError = EngineClosed("the engine was closed while this request was running.")
        try:
            while self._take_commands():
                self._step()
        except Exception as fault:  # an exception in a step stops the engine: every caller gets the error
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
        """Run the queued commands; sleep while the engine has no work. Return False when the thread is to stop."""
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
            deliver(
                output
                if failed is None
                else RequestFailed(
                    failed.error or f"request {output.request_id} failed: {failed.stop_reason}.",
                    code=str(failed.stop_reason),
                )
            )
