"""The asynchronous class: one engine thread, any number of callers, outputs as async iterators."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self

from quire.assemble import Engine, assemble
from quire.config.engine import EngineConfig
from quire.contracts.errors import EngineClosed, EngineDead, QuireError, RequestFailed
from quire.contracts.output import RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.entry.completion import Generation
from quire.entry.local import Messages, front_end, render_chat, tokenizer_of
from quire.entry.prompts import Prompt, PromptLike, parse_prompt
from quire.text.protocol import TextTokenizer

Inbox = Callable[[RequestOutput | Exception], None]


class AsyncLLM:
    """A model and its engine, for concurrent callers.

        async with AsyncLLM() as llm:
            async for out in llm.generate("Hello", SamplingParams(max_tokens=16)):
                print(out.outputs[0].text)

    Options as for `LLM`. The engine runs in a thread of its own; a caller that stops iterating aborts its request.
    """

    def __init__(self, model: str | PathLike[str] = "", **options: Any) -> None:
        self._engine: Engine | None = assemble(EngineConfig.from_flat(model=fspath(model), **options))
        self._front = front_end(self._engine)
        self._inboxes: dict[int, Inbox] = {}  # by first handle
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: QuireError | None = None  # why no request can be served any more
        self._gate = threading.Lock()  # no command is sent after the thread has ended
        self._thread = threading.Thread(target=self._serve, name="quire-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The parts behind: configuration, plans, core."""
        if self._engine is None:
            raise EngineClosed("this AsyncLLM is closed: make a new one.")
        return self._engine

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt: an output whenever there is something new, the last one with `finished`.

        Raises a `RequestError` when it cannot be served or fails by itself, `EngineDead` when the engine stops.
        """
        default = self.engine.default_params
        params = default if sampling_params is None else sampling_params
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | Exception]()
        started: list[Generation] = []

        def deliver(item: RequestOutput | Exception) -> None:
            try:
                loop.call_soon_threadsafe(inbox.put_nowait, item)
            except RuntimeError:  # the caller's event loop is closed: nobody listens any more
                self._abort(started)

        ready = parse_prompt(prompt)
        if ready.token_ids is None and self._front.tokenizer is not None:  # long texts must not stall anyone's stream
            ready = await loop.run_in_executor(None, self._front.tokenized, ready)

        def start() -> None:
            self._start(ready, params, deliver, started, request_id=request_id, priority=priority, timeout=timeout)

        self._send(start)
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            self._send(lambda: self._abort(started), quiet=True)

    def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template_kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation as a stream."""
        return self.generate(render_chat(self.engine, messages, **template_kwargs), sampling_params)

    def get_tokenizer(self) -> TextTokenizer:
        """The model's tokenizer; raises `InvalidParameter` when there is none (skip_tokenizer_init)."""
        return tokenizer_of(self._front)

    def get_default_sampling_params(self) -> SamplingParams:
        """A fresh copy of what is used when no parameters are given: the model's generation_config.json."""
        return self.engine.default_params.clone()

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; True when no request was running."""
        loop, core = asyncio.get_running_loop(), self.engine.core
        done: asyncio.Future[bool] = loop.create_future()

        def tell(answer: bool) -> None:
            if not done.done():  # the caller may have given up
                done.set_result(answer)

        def reset() -> None:
            answer = core.reset_prefix_cache()
            with suppress(RuntimeError):  # the caller's event loop is closed
                loop.call_soon_threadsafe(tell, answer)

        self._send(reset)
        return await done

    def close(self) -> None:
        """Abort everything, stop the thread and free the engine; idempotent."""
        with self._gate:
            self._commands.put(None)
        self._thread.join()
        with self._gate:  # whoever comes first frees it; a close that was interrupted can be repeated
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    # --- in the engine thread -----------------------------------------------------------------------------------

    def _start(
        self, prompt: Prompt, params: SamplingParams, deliver: Inbox, started: list[Generation], **options: Any
    ) -> None:
        try:
            if self._ended is not None:
                raise self._ended
            generation, requests = self._front.start(prompt, params, **options)
            started.append(generation)
            for request in requests:
                self.engine.core.add(request)
        except Exception as error:  # whatever is wrong with one request is its caller's alone
            self._abort(started)
            deliver(error)
            return
        self._inboxes[generation.completions[0].handle] = deliver

    def _abort(self, generations: list[Generation]) -> None:
        for generation in generations:
            self._inboxes.pop(generation.completions[0].handle, None)
            for handle in self._front.drop(generation):
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
            for deliver in list(self._inboxes.values()):  # a copy: a closed event loop's inbox removes itself
                deliver(ended)
            self._inboxes.clear()

    def _take_commands(self) -> bool:
        """Run what callers have sent; sleep when there is nothing to do. False when the engine is to stop."""
        while not self._commands.empty() or not self.engine.core.has_work:
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _step(self) -> None:
        outputs, stopped = self._front.apply(self.engine.core.step())
        for handle in stopped:
            self.engine.core.abort(handle)
        for handle, output in outputs:
            deliver = self._inboxes.get(handle)
            if deliver is None:
                continue
            if output.finished:
                del self._inboxes[handle]
            failure = next((c.stop_reason for c in output.outputs if c.finish_reason == "error"), None)
            deliver(
                output
                if failure is None
                else RequestFailed(f"request {output.request_id} failed: {failure}.", code=str(failure))
            )

    def _send(self, command: Callable[[], None], *, quiet: bool = False) -> None:
        with self._gate:
            if self._ended is None:
                self._commands.put(command)
            elif not quiet:
                raise self._ended
