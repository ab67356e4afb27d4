"""POST /v1/chat/completions: the next message of a conversation."""

import msgspec

from quire.contracts.errors import InvalidParameter
from quire.contracts.output import CompletionOutput, RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.entry.http.context import ServerContext
from quire.entry.http.exchange import Exchange
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.generate import Job, generate, make_job, shell, tail
from quire.entry.http.openai.logprobs import TokenNames, chat_logprobs
from quire.entry.http.openai.prompts import chat_prompt, spell_bad_words
from quire.entry.http.openai.sampling import sampling_params
from quire.entry.http.openai.schema import (
    AnswerMessage,
    ChatChoice,
    ChatDetails,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    Usage,
)
from quire.text.protocol import TextTokenizer

DECODER = RequestDecoder(ChatRequest, not_here=frozenset({"suffix", "best_of"}))
ENCODE = msgspec.json.Encoder().encode


async def chat(context: ServerContext, exchange: Exchange) -> None:
    """Answer one request."""
    request = await DECODER.read(context, exchange)
    request_id = exchange.name(request.request_id)
    model, text = context.model(request.model), context.text()
    params = _params(request, text.default_params, context.config.serve.stream_interval)
    prompt = await chat_prompt(context, exchange, request)
    await spell_bad_words(context, exchange, params)
    job = make_job(context, exchange, request, request_id=request_id, model=model, prompts=[prompt], params=params)
    await generate(context, exchange, job, ChatWriter(job, request, text.tokenizer))


def _params(request: ChatRequest, defaults: SamplingParams, stream_interval: int) -> SamplingParams:
    if request.top_logprobs is not None and not request.logprobs:
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


class ChatWriter:
    """Choices of /v1/chat/completions as JSON."""

    def __init__(self, job: Job, request: ChatRequest, tokenizer: TextTokenizer | None) -> None:
        self._job = job
        self._echoed = _echoed(request)
        self._with_logprobs = bool(request.logprobs)
        self._num_top = None if request.logprob_token_ids else request.top_logprobs or 0
        self._with_prompt_logprobs = request.prompt_logprobs is not None
        self._with_ids = bool(request.return_token_ids)
        self._plain = not (self._with_logprobs or self._with_ids)
        self._names = TokenNames(tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._empty = shell("chatcmpl", "chat.completion.chunk", job)
        self._heads = [self._empty + b'{"index":%d,"delta":{' % choice for choice in range(job.num_choices)]
        self._tail = tail(job)
        self._going_on = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def begin(self, prompt: int, output: RequestOutput) -> bytes:
        """The role of every choice, with the message that is continued when it is to be echoed."""
        end = self._going_on
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
        """An event with the text, then one with the reason when the choice has ended."""
        if self._plain and not usage and piece.finish_reason is None:
            return self._heads[choice] + b'"content":' + ENCODE(piece.text) + self._going_on if piece.text else b""
        end = b'],"usage":' + usage + b"}\n\n" if usage else self._tail
        parts = []
        if piece.text or (piece.token_ids and not self._plain):
            parts += [self._heads[choice], b'"content":', ENCODE(piece.text), b'},"logprobs":']
            parts += [ENCODE(self._logprobs(piece)), b',"finish_reason":null']
            if self._with_ids:
                parts += [b',"token_ids":', ENCODE(piece.token_ids)]
            parts += [b"}", end]
        if piece.finish_reason is not None:
            parts += [self._heads[choice], b'},"logprobs":null,"finish_reason":', ENCODE(piece.finish_reason)]
            parts += [b',"stop_reason":', ENCODE(piece.stop_reason), b"}", end]
        return b"".join(parts)

    def usage(self, usage: bytes) -> bytes:
        """The event with the counts."""
        return self._empty + b'],"usage":' + usage + b"}\n\n"

    def whole(self, outputs: list[RequestOutput], usage: Usage) -> bytes:
        """The answer in one piece."""
        output = outputs[0]
        answer = ChatResponse(
            id=f"chatcmpl-{self._job.request_id}",
            created=self._job.created,
            model=self._job.model,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=usage,
            prompt_logprobs=output.prompt_logprobs if self._with_prompt_logprobs else msgspec.UNSET,
            prompt_token_ids=output.prompt_token_ids if self._with_ids else msgspec.UNSET,
        )
        return ENCODE(answer)

    def _choice(self, completion: CompletionOutput) -> ChatChoice | ChatDetails:
        plain = ChatChoice(
            index=completion.index,
            message=AnswerMessage(content=self._echoed + completion.text),
            logprobs=self._logprobs(completion),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if not self._with_ids:
            return plain
        return ChatDetails(**msgspec.structs.asdict(plain), token_ids=completion.token_ids)

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        rows = completion.logprobs or []
        return chat_logprobs(self._names, completion.token_ids[: len(rows)], rows, self._num_top)


def _echoed(request: ChatRequest) -> str:
    """The message that the answer continues, when it is to be part of the answer."""
    last = request.messages[-1]
    if not (request.echo and request.continue_final_message) or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text or "" for part in last.content)
