"""Generation for one request: from the engine's stream to the client, as a whole answer or as events.

All routes that generate text share this. A `Writer` makes the JSON of each route. The engine's stream is always closed,
so that nothing is generated for a client that has disconnected.
"""

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from quire.answers.choice_parser import ChoiceParser, ParserPlan
from quire.answers.grammar import notes
from quire.contracts.errors import EngineClosed, InvalidParameter, RequestFailed
from quire.contracts.output import CompletionOutput, RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.entry.http.context import ServerContext
from quire.entry.http.observed.request_lines import log_generation
from quire.entry.http.openai.logprobs import TokenNames
from quire.entry.http.openai.prompts import away, spell_bad_words
from quire.entry.http.openai.sampling import grammar_error, request_timeout
from quire.entry.http.openai.schema import CachedTokens, CompletionTokens, SamplingFields, StreamOptions, Usage
from quire.entry.http.request_response import Exchange, Watch
from quire.entry.http.request_stream import Batch, RequestStream
from quire.entry.http.sse import DONE, EventStream
from quire.entry.prompts import Prompt
from quire.text.tokenizer import Tokenizer

MOST_NOTES, MOST_NOTE_CHARS = 20, 1_000  # limits of one warning about schema keywords that are not enforced
Request = TypeVar("Request", bound=SamplingFields)
Piece = tuple[int, CompletionOutput]  # (choice, its new part)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A validated request.

    parser_plan      plan for parsing the text of a choice into reasoning, content and calls
    num_choices      number of choices; choice c belongs to prompt c // params.n
    include_usage    send a last event with the token counts
    running_usage    send the token counts in every event
    """

    prompts: list[Prompt]
    params: SamplingParams
    request_id: str
    model: str
    created: int
    stream: bool
    parser_plan: ParserPlan = ParserPlan()
    priority: int | None = None
    timeout: float | None = None
    include_usage: bool = False
    running_usage: bool = False

    @property
    def num_choices(self) -> int:
        """Number of choices of all prompts."""
        return len(self.prompts) * self.params.n

    def parsers(self, tokenizer: Tokenizer | None) -> list[ChoiceParser]:
        """Make the parser of each choice, for a writer that shows reasoning and calls."""
        return [ChoiceParser(self.parser_plan, self.params, tokenizer) for _ in range(self.num_choices)]


class Writer(ABC):
    """Base of writers. A writer turns outputs into a route's answer: one JSON body, or the events of a stream."""

    _parsers: Sequence[ChoiceParser] = ()  # parsers of the choices, if these are more than text

    @property
    def num_thought(self) -> int:
        """Number of reasoning tokens of all choices."""
        return sum(parser.num_thought for parser in self._parsers)

    @abstractmethod
    def begin(self, prompt: int, output: RequestOutput, usage: bytes = b"") -> bytes:
        """Return the events that open the choices of a prompt, before their first piece. `usage`: see `piece`."""

    @abstractmethod
    def piece(self, choice: int, piece: CompletionOutput, usage: bytes) -> bytes:
        """Return the events for the new part of a choice; b"" when there is nothing to show.
        `usage`: JSON of the token counts so far, if every event has them; else b""."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """Return the events that close a stream after the last piece."""

    @abstractmethod
    def whole(self, outputs: list[RequestOutput], usage: Usage) -> bytes:
        """Return the whole answer. The writer adds the reasoning tokens to `usage`, since only it parses the text."""


class ChunkWriter(Writer):
    """A writer whose events are chunks of OpenAI's completions and chat routes.

    prefix    prefix of the answer's id, such as "chatcmpl"
    kind      "object" field of every event, such as "chat.completion.chunk"
    opening   JSON that follows the index of a choice in every event
    """

    def __init__(
        self,
        job: Job,
        request: SamplingFields,
        tokenizer: Tokenizer | None,
        *,
        with_logprobs: bool,
        prefix: str,
        kind: str,
        opening: bytes,
    ) -> None:
        self._job, self._with_logprobs = job, with_logprobs
        self._with_prompt_logprobs = request.prompt_logprobs is not None
        self._with_ids = bool(request.return_token_ids)
        self._text_only = not (self._with_logprobs or self._with_ids)
        self._names = TokenNames(tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._shared: dict[str, Any] = {"id": f"{prefix}-{job.request_id}", "created": job.created, "model": job.model}
        head = {"id": self._shared["id"], "object": kind, "created": job.created, "model": job.model}
        self._empty = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._heads = [self._empty + b'{"index":%d,' % choice + opening for choice in range(job.num_choices)]
        # With `include_usage`, every event except the last has "usage": null.
        self._tail = b'],"usage":null}\n\n' if job.include_usage else b"]}\n\n"

    def tail(self, usage: bytes) -> bytes:
        """Return the JSON that ends an event, with the token counts (`usage`) if given."""
        return b'],"usage":' + usage + b"}\n\n" if usage else self._tail

    def end(self, usage: Usage) -> bytes:
        """Return an event with the token counts, if the request asks for it, and [DONE]."""
        if not self._job.include_usage:
            return DONE
        return self._empty + b'],"usage":' + msgspec.json.encode(usage) + b"}\n\n" + DONE


async def answer(
    context: ServerContext,
    exchange: Exchange,
    request: Request,
    params_of: Callable[[Request, SamplingParams, int], SamplingParams],
    prompts_of: Callable[
        [ServerContext, Exchange, Request, SamplingParams], Awaitable[tuple[list[Prompt], ParserPlan]]
    ],
    writer: Callable[[Job, Request, Tokenizer | None], Writer],
) -> None:
    """Answer one request for generated text, on any route.

    params_of    makes the sampling parameters from the request, the defaults and the server's stream interval
    prompts_of   makes the prompts and the plan for parsing the answer; it may change the parameters
    writer       makes the `Writer` that formats the answer
    """
    request_id = exchange.name(request.request_id)
    model, text, serve = await context.find(request.model, exchange.scope), context.text(), context.config.serve
    params = params_of(request, text.default_params, serve.stream_interval)
    prompts, plan = await prompts_of(context, exchange, request, params)
    await spell_bad_words(context, exchange, params)
    options = request.stream_options or StreamOptions()
    job = Job(
        prompts=context.adapted(prompts, model),
        params=params,
        request_id=request_id,
        model=model,
        created=int(time.time()),
        stream=bool(request.stream),
        parser_plan=plan,
        priority=request.priority,
        timeout=request_timeout(exchange.header(b"x-request-timeout")),
        include_usage=bool(options.include_usage) or serve.enable_force_include_usage,
        running_usage=bool(options.continuous_usage_stats),
    )
    try:
        if (structured := params.structured_outputs) is not None:
            if found := await away(context, exchange, lambda: notes(structured)):
                exchange.warn(f"not enforced: {_told(found)}")
        await generate(context, exchange, job, writer(job, request, text.tokenizer))
    except (RequestFailed, InvalidParameter) as error:
        raise grammar_error(error, request, params, bool(plan.tools)) from error


def _told(notes: list[str]) -> str:
    """Join the notes that fit into a header, and append the number of the others."""
    ends = itertools.accumulate(len(note) + 2 for note in notes)
    told = max(1, min(MOST_NOTES, sum(end <= MOST_NOTE_CHARS for end in ends)))
    return "; ".join(notes[:told]) + (f"; and {len(notes) - told} more" if len(notes) > told else "")


async def generate(context: ServerContext, exchange: Exchange, job: Job, writer: Writer) -> None:
    """Run a job and send its answer. If this raises, the caller must call `Exchange.fail`, also within a stream."""
    with context.hold(exchange.scope, job.request_id) as ticket:
        async with exchange.watch() as watch:
            await asyncio.sleep(0)  # cancelled here if the client disconnected while its text was encoded
            stream = ticket.open(
                context.engine,
                job.prompts,
                job.params,
                request_id=job.request_id,
                priority=job.priority,
                timeout=job.timeout,
            )
            began = time.monotonic()
            try:
                if job.stream:
                    events = exchange.events(context.config.serve.keep_alive_interval)
                    await _events(events, stream, StreamProgress(job, writer), watch)
                    return
                answer = await _whole(stream, job, writer)
                watch.stop()
            finally:
                stream.close()
                if context.logs_requests:
                    log_generation(exchange.scope, job.request_id, [stream], time.monotonic() - began)
    await exchange.reply(answer)


async def _whole(stream: RequestStream, job: Job, writer: Writer) -> bytes:
    finals: dict[int, RequestOutput] = {}
    async for batch in stream:
        finals.update(batch)
    outputs = [finals[i] for i in range(len(job.prompts))]
    for output in outputs:
        for completion in output.outputs:
            check_end(completion)
    return writer.whole(
        outputs,
        usage(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
            sum(output.num_cached_tokens or 0 for output in outputs),
            drafts=[completion.drafts for output in outputs for completion in output.outputs],
        ),
    )


async def _events(events: EventStream, stream: RequestStream, progress: "StreamProgress", watch: Watch) -> None:
    def push(batch: Batch) -> None:
        """Write the outputs of a step to the client, as events, without waiting."""
        if data := progress.events(batch):
            events.push(data)

    stream.pour_into(lambda: events.ready, push)
    try:
        async for batch in stream:
            if data := progress.events(batch):
                await events.write(data)
        watch.stop()
        await events.end(progress.last())
    finally:
        events.stop_comments()


class StreamProgress:
    """Progress of the choices of one stream. Turns the engine's outputs into events."""

    def __init__(self, job: Job, writer: Writer) -> None:
        self._job = job
        self._writer = writer
        self._n = job.params.n
        self._single = job.num_choices == 1 and not job.running_usage
        self._begun = [False] * len(job.prompts)
        self._ended = [False] * job.num_choices
        self._num_prompt = sum(len(prompt.token_ids or ()) for prompt in job.prompts)
        self._num_output = 0
        self._cached = [0] * len(job.prompts)
        self._drafts: list[tuple[int, ...]] = []

    def events(self, batch: list[tuple[int, RequestOutput]]) -> bytes:
        """Return the server-sent events for new outputs, joined. `batch`: (prompt index, output) pairs. The
        writer gets the new outputs of a choice as one piece."""
        if self._single and self._begun[0]:
            piece = batch[-1][1].outputs[0]
            if len(batch) == 1 and piece.finish_reason is None:  # nearly every call
                self._num_output += len(piece.token_ids)
                return self._writer.piece(0, piece, b"")
        frames = []
        for at, output in batch:
            if not self._begun[at]:
                self._begun[at] = True
                self._cached[at] = output.num_cached_tokens or 0
                frames.append(self._writer.begin(at, output, self._counts()))
        for choice, piece in self._pieces(batch):
            self._num_output += len(piece.token_ids)
            frames.append(self._writer.piece(choice, piece, self._counts()))
            if piece.finish_reason is not None:
                check_end(piece)
                self._ended[choice] = True
                self._drafts.append(piece.drafts)
        return b"".join(frames)

    def last(self) -> bytes:
        """Return the events that end the stream: the token counts, if asked for, and the route's last event."""
        return self._writer.end(self._usage())

    def _counts(self) -> bytes:
        return msgspec.json.encode(self._usage()) if self._job.running_usage else b""

    def _usage(self) -> Usage:
        return usage(self._num_prompt, self._num_output, sum(self._cached), self._writer.num_thought, self._drafts)

    def _pieces(self, batch: list[tuple[int, RequestOutput]]) -> list[Piece]:
        """Return one piece per choice with new output. Pieces of several steps are joined."""
        if len(batch) == 1 and self._n == 1:
            at, output = batch[0]
            return [] if self._ended[at] else [(at, output.outputs[0])]
        merged: dict[int, CompletionOutput] = {}
        for at, output in batch:
            for completion in output.outputs:
                choice = at * self._n + completion.index
                if self._ended[choice] or not (completion.token_ids or completion.finish_reason or completion.text):
                    continue
                earlier = merged.get(choice)
                if earlier is None:
                    merged[choice] = completion
                else:
                    _append(earlier, completion)
        return list(merged.items())


def _append(piece: CompletionOutput, newer: CompletionOutput) -> None:
    """Append a later piece of the same choice, in place: no one else refers to a piece."""
    piece.text += newer.text
    piece.token_ids += newer.token_ids
    if newer.logprobs is not None:
        piece.logprobs = [*(piece.logprobs or ()), *newer.logprobs]
    piece.finish_reason, piece.stop_reason, piece.drafts = newer.finish_reason, newer.stop_reason, newer.drafts


def usage(
    num_prompt: int, num_output: int, num_cached: int, num_thought: int = 0, drafts: Sequence[tuple[int, ...]] = ()
) -> Usage:
    """Make the `usage` object of an answer. `num_thought`: reasoning tokens among the output tokens; `drafts`: of each
    choice, as in `Finish`."""
    told = CompletionTokens(reasoning_tokens=num_thought)
    if any(drafts):
        made, *accepted = map(sum, zip(*filter(None, drafts), strict=True))
        told.accepted_prediction_tokens, told.accepted_prediction_tokens_per_pos = sum(accepted), accepted
        told.rejected_prediction_tokens = made - sum(accepted)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=CachedTokens(cached_tokens=num_cached),
        completion_tokens_details=told,
    )


def check_end(completion: CompletionOutput) -> None:
    """Raise `EngineClosed` for a completion that was aborted because the server is stopping. A pause is no error."""
    if completion.finish_reason == "abort" and completion.stop_reason is None:
        raise EngineClosed("the request was aborted because the server is stopping: send it again.")
