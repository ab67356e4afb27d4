"""POST /v1/chat/completions: the next message of a conversation."""

from collections.abc import Callable

import msgspec

from quire.answers.answer_events import CallBegins, Event, Thought, Words
from quire.contracts.errors import InvalidParameter
from quire.contracts.output import CompletionOutput, RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.entry.http.context import ServerContext
from quire.entry.http.openai import schema
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.generate import ChunkWriter, Job, Writer, answer
from quire.entry.http.openai.logprobs import chat_logprobs
from quire.entry.http.openai.prompts import chat_prompts
from quire.entry.http.openai.sampling import sampling_params
from quire.entry.http.request_response import Exchange
from quire.text.tokenizer import Tokenizer

DECODER = RequestDecoder(schema.ChatRequest)
ENCODE = msgspec.json.Encoder().encode
WORDS = ((r"^logprobs$|\blogprobs(?==-?\d)", "top_logprobs"), (r"\bmax_logprobs\b", "--max-logprobs"))


async def chat(context: ServerContext, exchange: Exchange) -> None:
    """Answer a request of /v1/chat/completions."""
    request = await DECODER.read(context, exchange)
    # With ids the number of logprobs is theirs, and no field of the request is named top_logprobs.
    exchange.words = WORDS[1:] if request.logprob_token_ids else WORDS
    await answer_chat(
        context,
        exchange,
        request,
        lambda job, *rest: (ChatWriter if job.parser_plan.content_only else ChatEventWriter)(job, *rest),
    )


async def answer_chat(
    context: ServerContext,
    exchange: Exchange,
    request: schema.ChatRequest,
    writer: Callable[[Job, schema.ChatRequest, Tokenizer | None], Writer],
) -> None:
    """Answer a conversation. `writer` makes the `Writer` that formats the answer for the route's API."""
    await answer(context, exchange, request, _params, chat_prompts, writer)


def _params(request: schema.ChatRequest, defaults: SamplingParams, stream_interval: int) -> SamplingParams:
    if request.top_logprobs and not request.logprobs:
        raise InvalidParameter("top_logprobs needs logprobs=true.", param="top_logprobs")
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = request.top_logprobs or 0
    if request.logprob_token_ids:
        logprobs = len(request.logprob_token_ids)
    return sampling_params(
        request,
        defaults,
        max_tokens=defaults.max_tokens if asked is None else asked,
        logprobs=logprobs if request.logprobs else None,
        stream_interval=stream_interval,
    )


class ChatWriter(ChunkWriter):
    """Writer of /v1/chat/completions for plain answers: all text is content, without reasoning and tool calls."""

    def __init__(self, job: Job, request: schema.ChatRequest, tokenizer: Tokenizer | None) -> None:
        super().__init__(
            job,
            request,
            tokenizer,
            with_logprobs=bool(request.logprobs),
            prefix="chatcmpl",
            kind="chat.completion.chunk",
            opening=b'"delta":{',
        )
        self._echoed = _echoed(request)
        self._num_top = None if request.logprob_token_ids else request.top_logprobs or 0
        self._open_end = b'},"logprobs":null,"finish_reason":null}'
        self._going_on = self._open_end + self._tail

    def begin(self, prompt: int, output: RequestOutput, usage: bytes = b"") -> bytes:
        """Return an event for each choice: its role, and the continued message if the request asks for its echo."""
        end = self._open_end + self.tail(usage)
        if self._with_ids or self._with_prompt_logprobs:
            more = [b""]
            if self._with_ids:
                more.append(b'"prompt_token_ids":' + ENCODE(output.prompt_token_ids))
            if self._with_prompt_logprobs:
                more.append(b'"prompt_logprobs":' + ENCODE(output.prompt_logprobs))
            end = end[:-3] + b",".join(more) + b"}\n\n"
        opening = b'"role":"assistant","content":' + ENCODE(self._echoed) + end
        return b"".join(head + opening for head in self._heads)

    def piece(self, choice: int, piece: CompletionOutput, usage: bytes) -> bytes:
        """Return an event with the text, then one with the finish reason when the choice has ended."""
        if self._text_only and not usage and piece.finish_reason is None:
            return self._heads[choice] + b'"content":' + ENCODE(piece.text) + self._going_on if piece.text else b""
        shown = bool(piece.text or (piece.token_ids and not self._text_only))
        deltas = [b'"content":' + ENCODE(piece.text)] if shown else []
        return self._chunks(choice, piece, deltas, piece.finish_reason, usage)

    def _chunks(
        self, choice: int, piece: CompletionOutput, deltas: list[bytes], reason: str | None, usage: bytes
    ) -> bytes:
        """Return an event per delta, the first with logprobs and token ids, then one with the finish reason."""
        head, end = self._heads[choice], self.tail(usage)
        parts = []
        for at, delta in enumerate(deltas):
            parts += [head, delta, b'},"logprobs":', b"null" if at else ENCODE(self._logprobs(piece))]
            parts += [b',"finish_reason":null']
            if self._with_ids and not at:
                parts += [b',"token_ids":', ENCODE(piece.token_ids)]
            parts += [b"}", end]
        if reason is not None:
            parts += [head, b'},"logprobs":null,"finish_reason":', ENCODE(reason)]
            parts += [b',"stop_reason":', ENCODE(piece.stop_reason), b"}", end]
        return b"".join(parts)

    def whole(self, outputs: list[RequestOutput], usage: schema.Usage) -> bytes:
        """Return the whole answer."""
        output = outputs[0]
        choices = [self._choice(completion) for completion in output.outputs]
        usage.completion_tokens_details.reasoning_tokens = self.num_thought
        return ENCODE(
            schema.ChatResponse(
                **self._shared,
                choices=choices,
                usage=usage,
                kv_transfer_params=output.kv_transfer_params or msgspec.UNSET,
                prompt_logprobs=output.prompt_logprobs if self._with_prompt_logprobs else msgspec.UNSET,
                prompt_token_ids=output.prompt_token_ids if self._with_ids else msgspec.UNSET,
            )
        )

    def _choice(self, completion: CompletionOutput) -> schema.ChatChoice:
        message, reason = self._message(completion)
        return schema.ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self._logprobs(completion),
            finish_reason=reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._with_ids else msgspec.UNSET,
        )

    def _message(self, completion: CompletionOutput) -> tuple[schema.AnswerMessage, str | None]:
        return schema.AnswerMessage(content=self._echoed + completion.text), completion.finish_reason

    def _logprobs(self, completion: CompletionOutput) -> schema.ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        rows = completion.logprobs or []
        return chat_logprobs(self._names, completion.token_ids[: len(rows)], rows, self._num_top)


class ChatEventWriter(ChatWriter):
    """Writer of /v1/chat/completions for answers that may have reasoning and tool calls besides content."""

    def __init__(self, job: Job, request: schema.ChatRequest, tokenizer: Tokenizer | None) -> None:
        super().__init__(job, request, tokenizer)
        self._parsers = job.parsers(tokenizer)

    def piece(self, choice: int, piece: CompletionOutput, usage: bytes) -> bytes:
        """Return an event for each event of the parser, then one with the finish reason when the choice has ended."""
        parser = self._parsers[choice]
        deltas = [_delta(event) for event in parser.events(piece)]
        if self._text_only and not usage and piece.finish_reason is None:
            return b"".join([self._heads[choice] + delta + self._going_on for delta in deltas])
        if piece.token_ids and not (deltas or self._text_only):
            deltas = [b""]
        return self._chunks(choice, piece, deltas, parser.finish_reason(piece), usage)

    def _message(self, completion: CompletionOutput) -> tuple[schema.AnswerMessage, str | None]:
        parser, thought, words = self._parsers[completion.index], "", self._echoed
        calls: list[schema.ToolCall] = []
        for event in parser.events(completion):
            if isinstance(event, Thought):
                thought += event.text
            elif isinstance(event, Words):
                words += event.text
            elif isinstance(event, CallBegins):
                function = schema.FunctionCall(name=event.name, arguments="")
                calls.append(schema.ToolCall(id=event.call_id, type="function", function=function))
            else:
                calls[event.index].function.arguments += event.text
        message = schema.AnswerMessage(content=words or (None if calls else ""), tool_calls=calls or msgspec.UNSET)
        message.reasoning = message.reasoning_content = thought or msgspec.UNSET
        return message, parser.finish_reason(completion)


def _delta(event: Event) -> bytes:
    """Return the members of a chunk's delta as JSON."""
    if isinstance(event, Words):
        return b'"content":' + ENCODE(event.text)
    if isinstance(event, Thought):
        return b'"reasoning":%b,"reasoning_content":%b' % ((ENCODE(event.text),) * 2)
    call = b'"tool_calls":[{"index":%d,' % event.index
    if isinstance(event, CallBegins):
        call += b'"id":%b,"type":"function",' % ENCODE(event.call_id)
        return call + b'"function":{"name":%b,"arguments":""}}]' % ENCODE(event.name)
    return call + b'"function":{"arguments":%b}}]' % ENCODE(event.text)


def _echoed(request: schema.ChatRequest) -> str:
    """Return the message that the answer continues, if the request echoes it; else ""."""
    last = request.messages[-1]
    if not (request.echo and request.continue_final_message) or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text or "" for part in last.content)
