"""The asynchronous class `AsyncLLM`: one engine thread serves any number of callers through async iterators."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from typing import Any, Self

from quire.assemble.engine import Engine, assemble
from quire.config.flags import keyword_config
from quire.contracts.adapters import LoRARequest
from quire.contracts.output import EmbeddingRequestOutput, RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.entry.completion import Generation
from quire.entry.embedding import embed_params, embedding_output
from quire.entry.engine_thread import EngineThread
from quire.entry.local import Messages, check_adapter, named_adapters, render_chat, tokenizer_of
from quire.entry.prompts import PromptLike, parse_prompt
from quire.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model and its engine, for concurrent callers.

        async with AsyncLLM() as llm:
            async for out in llm.generate("Hello", SamplingParams(max_tokens=16)):
                print(out.outputs[0].text)

    Options as for `LLM`. The engine runs in its own thread. A request is aborted when its caller stops iterating.
    """

    def __init__(self, model: str | PathLike[str] = "", **options: Any) -> None:
        self._served = EngineThread(assemble(keyword_config(fspath(model), options)))
        self._adapters = named_adapters(self._served.engine)
        # The thread holds no reference to this object: it is closed when it is garbage-collected, or at exit.
        weakref.finalize(self, self._served.close)

    @property
    def engine(self) -> Engine:
        """The engine: its configuration, plans and core. Raises `EngineClosed` after `close`."""
        return self._served.engine

    def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt. Yield an output whenever there are new tokens; the last output has `finished` set.

        timeout        seconds after which the request fails; None = no limit
        lora_request   adapter of the request; the engine needs enable_lora=True
        Raises a `RequestError` when the request cannot be served or fails, `EngineDead` when the engine stops.
        """
        asked = {"request_id": request_id, "priority": priority, "timeout": timeout}
        return self._outputs(prompt, sampling_params, [], lora_request, **asked)

    async def embed(
        self,
        prompt: PromptLike,
        *,
        dimensions: int | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """Return the embedding of one prompt. `dimensions`: as for `LLM.embed`. The rest is as for `generate`."""
        plan, started = self.engine.pooling, list[Generation]()
        plan.check(dimensions)
        asked = {"request_id": request_id, "priority": priority, "timeout": timeout, "pool": plan.method}
        async for _ in self._outputs(prompt, embed_params(), started, lora_request, **asked):
            pass
        return embedding_output(started[0], plan, dimensions)

    async def _outputs(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None,
        started: list[Generation],
        lora_request: LoRARequest | None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        default, served = self.engine.default_params, self._served
        params = default if sampling_params is None else sampling_params
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | Exception]()

        def deliver(item: RequestOutput | Exception) -> None:
            try:
                loop.call_soon_threadsafe(inbox.put_nowait, item)
            except RuntimeError:  # the caller's event loop is closed: abort the request
                served.abort(started)

        ready = parse_prompt(prompt)
        if ready.token_ids is None and served.front.tokenizer is not None:  # a long text must not block the loop
            ready = await loop.run_in_executor(None, served.front.tokenized, ready)
        if lora_request is not None:  # its files may have to be read
            found = partial(check_adapter, served.engine, self._adapters, lora_request)
            ready = replace(ready, adapter=await loop.run_in_executor(None, found))

        def start() -> None:
            served.start(ready, params, deliver, started, **options)

        served.send(start)
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            served.send(lambda: served.abort(started), quiet=True)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **template_kwargs: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation. Yields outputs as `generate` does. `template_kwargs`: options of `render_chat`."""
        rendered = render_chat(self.engine, messages, **template_kwargs)
        return self.generate(rendered, sampling_params, lora_request=lora_request)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises `InvalidParameter` when there is none (skip_tokenizer_init)."""
        return tokenizer_of(self._served.front)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the default sampling parameters, which come from the model's generation_config.json."""
        return self.engine.default_params.clone()

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Running requests keep their KV blocks. True when no request was running."""
        loop, core = asyncio.get_running_loop(), self.engine.core
        done: asyncio.Future[bool] = loop.create_future()

        def tell(answer: bool) -> None:
            if not done.done():  # the caller may have cancelled
                done.set_result(answer)

        def reset() -> None:
            answer = core.reset_prefix_cache()
            with suppress(RuntimeError):  # the caller's event loop is closed
                loop.call_soon_threadsafe(tell, answer)

        self._served.send(reset)
        return await done

    def close(self) -> None:
        """Abort every request, stop the thread and free the engine; idempotent."""
        self._served.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)
