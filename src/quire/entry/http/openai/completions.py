"""POST /v1/completions: text after a prompt, with OpenAI's legacy logprobs."""

import msgspec

from quire.contracts.output import CompletionOutput, LogprobsByToken, RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.entry.http.context import ServerContext
from quire.entry.http.exchange import Exchange
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.generate import Job, generate, make_job, shell, tail
from quire.entry.http.openai.logprobs import LegacyColumns, TokenNames, joined, prompt_columns
from quire.entry.http.openai.prompts import completion_prompts, spell_bad_words
from quire.entry.http.openai.sampling import sampling_params
from quire.entry.http.openai.schema import (
    CompletionChoice,
    CompletionDetails,
    CompletionRequest,
    CompletionResponse,
    LegacyLogprobs,
    Usage,
)
from quire.text.protocol import TextTokenizer

DECODER = RequestDecoder(CompletionRequest)
MAX_TOKENS = 16  # OpenAI's default
ENCODE = msgspec.json.Encoder().encode


async def complete(context: ServerContext, exchange: Exchange) -> None:
    """Answer one request."""
    request = await DECODER.read(context, exchange)
    request_id = exchange.name(request.request_id)
    model, text = context.model(request.model), context.text()
    params = _params(request, text.default_params, context.config.serve.stream_interval)
    prompts = await completion_prompts(context, exchange, request)
    await spell_bad_words(context, exchange, params)
    job = make_job(context, exchange, request, request_id=request_id, model=model, prompts=prompts, params=params)
    await generate(context, exchange, job, CompletionWriter(job, request, text.tokenizer))


def _params(request: CompletionRequest, defaults: SamplingParams, stream_interval: int) -> SamplingParams:
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = MAX_TOKENS if defaults.max_tokens is None else defaults.max_tokens
    params = sampling_params(
        request, defaults, max_tokens=max_tokens, logprobs=request.logprobs, stream_interval=stream_interval
    )
    if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = request.logprobs
    return params


class CompletionWriter:
    """Choices of /v1/completions as JSON."""

    def __init__(self, job: Job, request: CompletionRequest, tokenizer: TextTokenizer | None) -> None:
        self._job = job
        self._echo = bool(request.echo)
        self._with_logprobs = request.logprobs is not None
        self._with_prompt_logprobs = request.prompt_logprobs is not None
        self._with_ids = bool(request.return_token_ids)
        self._plain = not (self._with_logprobs or self._with_ids)
        self._names = TokenNames(tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._columns: dict[int, LegacyColumns] = {}
        head = shell("cmpl", "text_completion", job)
        self._heads = [head + b'{"index":%d,"text":' % choice for choice in range(job.num_choices)]
        self._empty = head
        self._tail = tail(job)
        self._going_on = b',"logprobs":null,"finish_reason":null,"stop_reason":null}' + self._tail

    def begin(self, prompt: int, output: RequestOutput) -> bytes:
        """The prompt, when it is to be echoed or its ids or logprobs are asked for."""
        if not (self._echo or self._with_prompt_logprobs or self._with_ids):
            return b""
        echoed = self._echoed(prompt, output)
        logprobs = self._echoed_logprobs(echoed, output)
        parts = [ENCODE(echoed), b',"logprobs":', ENCODE(logprobs), b',"finish_reason":null,"stop_reason":null']
        if self._with_prompt_logprobs:
            parts += [b',"prompt_logprobs":', ENCODE(output.prompt_logprobs)]
        if self._with_ids:
            parts += [b',"prompt_token_ids":', ENCODE(output.prompt_token_ids), b',"token_ids":[]']
        body = b"".join([*parts, b"}", self._tail])
        n = self._job.params.n
        return b"".join(self._heads[choice] + body for choice in range(prompt * n, prompt * n + n))

    def piece(self, choice: int, piece: CompletionOutput, usage: bytes) -> bytes:
        """One event."""
        if self._plain and not usage and piece.finish_reason is None:
            return self._heads[choice] + ENCODE(piece.text) + self._going_on if piece.text else b""
        if not (piece.token_ids or piece.text or piece.finish_reason):
            return b""
        logprobs = b"null"
        if self._with_logprobs and piece.logprobs is not None:
            logprobs = ENCODE(self._choice_columns(choice).rows(piece.token_ids, piece.logprobs))
        parts = [self._heads[choice], ENCODE(piece.text), b',"logprobs":', logprobs]
        parts += [b',"finish_reason":', ENCODE(piece.finish_reason), b',"stop_reason":', ENCODE(piece.stop_reason)]
        if self._with_ids:
            parts += [b',"token_ids":', ENCODE(piece.token_ids)]
        parts += [b'}],"usage":', usage, b"}\n\n"] if usage else [b"}", self._tail]
        return b"".join(parts)

    def usage(self, usage: bytes) -> bytes:
        """The event with the counts."""
        return self._empty + b'],"usage":' + usage + b"}\n\n"

    def whole(self, outputs: list[RequestOutput], usage: Usage) -> bytes:
        """The answer in one piece."""
        choices: list[CompletionChoice | CompletionDetails] = []
        for prompt, output in enumerate(outputs):
            echoed = self._echoed(prompt, output) if self._echo else ""
            before = self._echoed_logprobs(echoed, output)
            for completion in output.outputs:
                choices.append(self._choice(prompt, output, completion, echoed, before))
        answer = CompletionResponse(
            id=f"cmpl-{self._job.request_id}",
            created=self._job.created,
            model=self._job.model,
            choices=choices,
            usage=usage,
        )
        return ENCODE(answer)

    def _choice(
        self,
        prompt: int,
        output: RequestOutput,
        completion: CompletionOutput,
        echoed: str,
        before: LegacyLogprobs | None,
    ) -> CompletionChoice | CompletionDetails:
        choice, logprobs = prompt * self._job.params.n + completion.index, before
        if self._with_logprobs:
            rows: list[LogprobsByToken] = completion.logprobs or []
            after = self._choice_columns(choice, len(echoed)).rows(completion.token_ids[: len(rows)], rows)
            logprobs = after if before is None else joined(before, after)
        plain = CompletionChoice(
            index=choice,
            text=echoed + completion.text,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if not (self._with_ids or self._with_prompt_logprobs):
            return plain
        return CompletionDetails(
            **msgspec.structs.asdict(plain),
            prompt_logprobs=output.prompt_logprobs if self._with_prompt_logprobs else None,
            prompt_token_ids=output.prompt_token_ids if self._with_ids else None,
            token_ids=completion.token_ids if self._with_ids else None,
        )

    def _choice_columns(self, choice: int, offset: int = 0) -> LegacyColumns:
        columns = self._columns.get(choice)
        if columns is None:
            skip = self._job.params.skip_special_tokens
            columns = self._columns[choice] = LegacyColumns(self._names, skip_special=skip, offset=offset)
        return columns

    def _echoed(self, prompt: int, output: RequestOutput) -> str:
        """The text of a prompt, as it was given or as its tokens read."""
        if not self._echo:
            return ""
        text = self._job.prompts[prompt].text
        if text is None and self._names.tokenizer is not None:
            skip = self._job.params.skip_special_tokens
            text = self._names.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip)
        n = self._job.params.n
        if self._with_logprobs:
            for choice in range(prompt * n, prompt * n + n):
                self._choice_columns(choice, len(text or ""))
        return text or ""

    def _echoed_logprobs(self, text: str, output: RequestOutput) -> LegacyLogprobs | None:
        if not (self._echo and self._with_logprobs and output.prompt_logprobs is not None):
            return None
        return prompt_columns(self._names, text, output.prompt_token_ids, output.prompt_logprobs)
