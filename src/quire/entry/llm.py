"""The offline class `LLM`: it takes prompts and returns outputs. The engine runs in the caller's thread."""

import logging
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Self

from quire.assemble.engine import Engine, assemble
from quire.config.flags import keyword_config
from quire.contracts.adapters import LoRARequest
from quire.contracts.errors import EngineClosed, EngineDead, InvalidParameter
from quire.contracts.output import (
    BeamSearchOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.contracts.request import NewRequest
from quire.contracts.sampling import BeamSearchParams, OutputKind, SamplingParams
from quire.entry import offline_life
from quire.entry.adapters import read_requests
from quire.entry.beam import beam_search
from quire.entry.completion import Generation
from quire.entry.embedding import (
    TASK,
    TASKS,
    embed_params,
    embedding_output,
    likeness,
    paired,
    pooling_output,
    vector_of,
)
from quire.entry.keyboard_interrupt import uninterrupted
from quire.entry.local import (
    Messages,
    check_adapter,
    front_end,
    named_adapters,
    render_chat,
    set_processors,
    tokenizer_of,
)
from quire.entry.prompts import Prompt, PromptLike, parse_prompts
from quire.entry.unsupported import check_arguments, no_attribute
from quire.observe.progress import Progress
from quire.procs.life import Life
from quire.text.tokenizer import Tokenizer

LOG = logging.getLogger("quire")
ParamsLike = SamplingParams | Sequence[SamplingParams] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
Mail = deque[tuple[int, RequestOutput]]  # (handle of the prompt's first completion, output)


class LLM:
    """A model and its engine, for batch work.

        with LLM("path/or/hub-id", max_model_len=4096) as llm:
            for out in llm.generate(["Hello"], SamplingParams(max_tokens=16)):
                print(out.outputs[0].text)

    model     folder or hub id; "" = the bundled quire-tiny
    options   fields of `EngineConfig`; `quire serve --help` lists them
    Raises a `UserError` that names the fix when the model or an option cannot be served.
    life      pauses, sleep and weight updates of the engine, until `close`
    Not thread-safe: concurrent callers use `AsyncLLM`.
    """

    def __init__(self, model: str | PathLike[str] = "", **options: Any) -> None:
        self._engine: Engine | None = assemble(keyword_config(fspath(model), options), served=False)
        self._front = front_end(self._engine, processors=True)
        self._processed: dict[int, list[NewRequest]] = {}  # requests with logits processors, by first handle
        self._adapters = named_adapters(self._engine)
        self._mail: dict[int, Mail] = {}  # by first handle: callers may read several streams in turn
        self.life = Life(self._engine.core, self._step)
        self._dead: EngineDead | None = None  # set when the engine has stopped for good

    @property
    def engine(self) -> Engine:
        """The engine: its configuration, plans and core. Raises `EngineClosed` after `close`."""
        if self._engine is None:
            raise EngineClosed("this LLM is closed: make a new one.")
        return self._engine

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike] | None = None,
        sampling_params: ParamsLike = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete every prompt. Return the outputs in the order of the prompts.

        prompts           a string, token ids, {"prompt": ...}, {"prompt_token_ids": ...}, or a list of these
        sampling_params   one for all, or one per prompt; None = the model's own defaults
        priority          one number per prompt, smaller first (with scheduling_policy="priority")
        lora_request      adapter for all, or one (or None) per prompt; the engine needs enable_lora=True
        others            arguments of vLLM's `LLM.generate`: None is accepted, any other value is refused by name
        Raises a `RequestError` before anything runs when a prompt or its parameters cannot be served.
        A request that fails later (invalid grammar, NaN logits) fails alone; the other requests go on. Its completion
        has finish_reason "error", a code in `stop_reason` and the message in `error`. The message is logged.
        """
        check_arguments(LLM.generate, others)
        parsed = self._adapted(parse_prompts(prompts), lora_request)
        params = self._params(sampling_params, len(parsed))
        final = [p.clone(output_kind=OutputKind.FINAL_ONLY) for p in params]
        started: list[Generation] = []
        done: dict[int, RequestOutput] = {}
        with (
            Progress("Generating", len(parsed), enabled=use_tqdm, unit="prompt") as progress,
            closing(self._run(parsed, final, priority, started)) as outputs,
        ):
            for output, first_handle in outputs:
                done[first_handle] = output
                progress.advance(1)
        failed = Counter(
            c.error or str(c.stop_reason)
            for output in done.values()
            for c in output.outputs
            if c.finish_reason == "error"
        )
        for cause, count in failed.items():
            LOG.error("%d of %d completions failed: %s", count, sum(p.n for p in params), cause)
        return [done[g.completions[0].handle] for g in started]

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        dimensions: int | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Embed every prompt by the model's pooling method. Return the outputs in the order of the prompts.

        dimensions   keep this many numbers of each vector, the first ones, normalized to length 1; None = all
        Each output has its vector in `outputs.embedding`. Other arguments and errors are as in `generate`, but a
        request that fails alone has the code of its error in `outputs.error`.
        """
        check_arguments(LLM.embed, others)
        plan = self.engine.pooling
        plan.check(dimensions)
        adapted = self._adapted(parse_prompts(prompts), lora_request)
        return [embedding_output(g, plan, dimensions) for g in self._pool(adapted, use_tqdm, priority)]

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """Return the pooled output of every prompt, in `outputs.data`, an array. `pooling_task`: "embed", as for
        `embed`. vLLM's other tasks raise `InvalidParameter`."""
        check_arguments(LLM.encode, others)
        if pooling_task != TASK:
            raise InvalidParameter(f"pooling_task={pooling_task!r}: {TASKS}", param="pooling_task")
        return [pooling_output(one) for one in self.embed(prompts, use_tqdm=use_tqdm, lora_request=lora_request)]

    def score(
        self,
        text_1: PromptLike | Sequence[PromptLike],
        text_2: PromptLike | Sequence[PromptLike],
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Return the cosine similarity of text pairs: one text with each of several, or two lists pair by pair.

        Raises `InvalidParameter` when the model does not declare a pooling method, `RequestFailed` when a prompt fails.
        """
        check_arguments(LLM.score, others)
        plan = self.engine.pooling
        plan.check_scores()
        first, second = parse_prompts(text_1), parse_prompts(text_2)
        pairs = [(one, len(first) + other) for one, other in paired(first, second)]
        done = self._pool(self._adapted([*first, *second], lora_request), use_tqdm)
        vectors, ids = [vector_of(g, plan) for g in done], [g.prompt_token_ids for g in done]
        return [
            ScoringRequestOutput(
                request_id=done[b].request_id,
                prompt_token_ids=ids[a] + ids[b],
                outputs=ScoringOutput(score=likeness(vectors[a], vectors[b])),
            )
            for a, b in pairs
        ]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ParamsLike = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of {"role": ..., "content": ...}. See `generate`, `render_chat`.

        others   `lora_request`, and the arguments that `generate` refuses by name
        """
        lora_request: Adapters = others.pop("lora_request", None)
        check_arguments(LLM.chat, others)
        several = bool(messages) and not isinstance(messages[0], dict)
        conversations: Sequence[Any] = messages if several else [messages]
        prompts = [
            render_chat(
                self.engine,
                m,
                chat_template=chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for m in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt and yield an output per step; with output_kind=DELTA each holds only the new tokens."""
        params = self._params(sampling_params, 1)
        with closing(self._run(self._adapted(parse_prompts([prompt]), lora_request), params, None, [])) as outputs:
            for output, _ in outputs:
                yield output

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template_kwargs: Any
    ) -> Iterator[RequestOutput]:
        """Answer one conversation. Yields outputs as `stream` does. `template_kwargs`: options of `render_chat`."""
        return self.stream(render_chat(self.engine, messages, **template_kwargs), sampling_params)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` most likely completions of every prompt, best first."""
        check_arguments(LLM.beam_search, others)

        def generate(batch: list[Prompt], step: SamplingParams) -> list[RequestOutput]:
            return self.generate(batch, step, use_tqdm=use_tqdm)

        return beam_search(self._front, generate, self._adapted(parse_prompts(prompts), lora_request), params)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises `InvalidParameter` when there is none (skip_tokenizer_init)."""
        return tokenizer_of(self._front)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the default sampling parameters, which come from the model's generation_config.json."""
        return self.engine.default_params.clone()

    sleep = offline_life.sleep
    wake_up = offline_life.wake_up
    init_weight_transfer_engine = offline_life.init_weight_transfer_engine
    start_weight_update = offline_life.start_weight_update
    update_weights = offline_life.update_weights
    finish_weight_update = offline_life.finish_weight_update

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Running requests keep their KV blocks. True when no request was running."""
        return self.engine.core.reset_prefix_cache()

    def close(self) -> None:
        """Stop the engine and free its memory; idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            del self.life  # it holds the core

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # a type checker must still report unknown attributes

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(type(self).__name__, name)

    def _params(self, given: ParamsLike, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.engine.default_params] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        wrong = [type(p).__name__ for p in given if not isinstance(p, SamplingParams)]
        if isinstance(given, Mapping) or wrong:
            raise InvalidParameter(
                f"sampling_params must be SamplingParams, or a list of them, not "
                f"{wrong[0] if isinstance(given, list) else type(given).__name__}.",
                param="sampling_params",
            )
        if len(given) != count:
            raise InvalidParameter(
                f"{count} prompts and {len(given)} sampling params: give one for all, or one each.",
                param="sampling_params",
            )
        return list(given)

    def _adapted(self, prompts: list[Prompt], given: Adapters) -> list[Prompt]:
        """Return the prompts with the adapters of `lora_request`; those of new ones are checked against the model."""
        asked = read_requests(given, len(prompts))
        found = {
            one: check_adapter(self.engine, self._adapters, one) for one in dict.fromkeys(asked) if one is not None
        }
        return [
            prompt if one is None else replace(prompt, adapter=found[one])
            for prompt, one in zip(prompts, asked, strict=True)
        ]

    def _pool(self, prompts: list[Prompt], use_tqdm: bool, priority: Sequence[int] | None = None) -> list[Generation]:
        """Compute the vectors of all prompts; each `Generation` returned holds its own."""
        started: list[Generation] = []
        params = [embed_params()] * len(prompts)
        with (
            Progress("Embedding", len(prompts), enabled=use_tqdm, unit="prompt") as progress,
            closing(self._run(prompts, params, priority, started, self.engine.pooling.method)) as outputs,
        ):
            for _ in outputs:
                progress.advance(1)
        return started

    def _start(
        self, prompt: Prompt, params: SamplingParams, started: list[Generation], mail: Mail, **options: Any
    ) -> None:
        """Queue one prompt with all of its completions. If one is refused, the owner of `started` aborts the others."""
        generation, requests = self._front.start(prompt, params, **options)
        self._mail[generation.completions[0].handle] = mail
        started.append(generation)
        if params.logits_processors:
            self._processed[generation.completions[0].handle] = requests
            set_processors(self.engine, requests, params.logits_processors)
        for request in requests:
            self.engine.core.add(request, places=0)  # past the queue's limit, which protects a server from its clients

    def _run(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        priority: Sequence[int] | None,
        started: list[Generation],
        pool: str = "",
    ) -> Generator[tuple[RequestOutput, int], None, None]:
        """Queue all prompts, or none, and step the engine until they have finished.

        Yields (output, handle of the prompt's first completion) and fills `started`. Closing the generator aborts the
        prompts. Requests that an interrupted run left in the core are aborted first.
        """
        if self._dead is not None:
            raise self._dead
        if priority is not None and len(priority) != len(prompts):
            raise InvalidParameter(
                f"{len(prompts)} prompts and {len(priority)} priorities: give one each.", param="priority"
            )
        if self._engine is not None:
            self.life.check_running()
        ready: Mail = deque()
        try:
            with uninterrupted():
                self._abort_orphans()
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
                with uninterrupted():  # a queued request is always in `started`, so that it can be aborted
                    self._start(prompt, p, started, ready, priority=priority[i] if priority else 0, pool=pool)
            num_open = len(started)
            while True:
                while ready:  # filled by this stream's steps and by those of other open streams
                    handle, output = ready.popleft()
                    num_open -= output.finished
                    yield output, handle
                if not num_open:
                    return
                core = self.engine.core
                self.life.check_running()
                assert core.has_work, "a request has got lost"
                self._step()
        finally:
            with uninterrupted():
                for generation in started:
                    self._mail.pop(generation.completions[0].handle, None)
                self._abort_orphans()
                for generation in started if self._engine is not None else ():
                    set_processors(self._engine, self._processed.pop(generation.completions[0].handle, ()), ())

    def _step(self) -> None:
        """Run one engine step and put each output into its reader's mail. After an exception the engine is dead."""
        core = self.engine.core
        if self._dead is not None:
            raise self._dead
        try:
            with uninterrupted():
                outputs, stopped = self._front.apply(core.step())
                for handle in stopped:
                    core.abort(handle)
                for handle, output in outputs:
                    if (mail := self._mail.get(handle)) is not None:  # None: the reader has closed its stream
                        mail.append((handle, output))
        except Exception as fault:
            self._dead = EngineDead(f"the engine stopped: {fault}")
            raise self._dead from fault
        except BaseException:
            if core.torn:  # a second Ctrl-C, in the middle of the step
                self._dead = EngineDead("the engine stopped: a step was interrupted.")
            raise

    def _abort_orphans(self) -> None:
        """Abort every request that has no reader. An interrupted call can be repeated."""
        for generation in self._front.live():
            if generation.completions[0].handle not in self._mail:
                self._front.drop(generation)
        if self._engine is None or self._dead is not None or self._engine.core.torn:
            return  # torn but not dead: this stream is garbage-collected during a step of another stream
        core = self._engine.core
        for handle in core.handles:
            if handle not in self._front:
                core.abort(handle)
        while core.has_work and not len(self._front):
            self._step()
