"""POST /v1/completions: text after a prompt, with OpenAI's legacy logprobs."""

import msgspec

from quire.contracts.output import CompletionOutput, LogprobsByToken, RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.entry.http.context import ServerContext
from quire.entry.http.openai import schema
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.generate import ChunkWriter, Job, answer
from quire.entry.http.openai.logprobs import LegacyColumns, joined, prompt_columns
from quire.entry.http.openai.prompts import IDS, completion_prompts
from quire.entry.http.openai.sampling import sampling_params
from quire.entry.http.request_response import Exchange
from quire.entry.http.vectors.prompt_embeds import embedded_prompts
from quire.text.tokenizer import Tokenizer

DECODER = RequestDecoder(schema.CompletionRequest)
MAX_TOKENS = 16  # OpenAI's default
ENCODE = msgspec.json.Encoder().encode
WORDS = ((IDS, "prompt"), (r"\bmax_logprobs\b", "--max-logprobs"))


async def complete(context: ServerContext, exchange: Exchange) -> None:
    """Answer a request of /v1/completions."""
    request = await DECODER.read(context, exchange)
    exchange.words = WORDS
    prompts = embedded_prompts if request.prompt_embeds else completion_prompts
    await answer(context, exchange, request, _params, prompts, CompletionWriter)


def _params(request: schema.CompletionRequest, defaults: SamplingParams, stream_interval: int) -> SamplingParams:
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = MAX_TOKENS if defaults.max_tokens is None else defaults.max_tokens
    params = sampling_params(
        request, defaults, max_tokens=max_tokens, logprobs=request.logprobs, stream_interval=stream_interval
    )
    if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = request.logprobs
    return params


class CompletionWriter(ChunkWriter):
    """Writer of choices of /v1/completions as JSON."""

    def __init__(self, job: Job, request: schema.CompletionRequest, tokenizer: Tokenizer | None) -> None:
        super().__init__(
            job,
            request,
            tokenizer,
            with_logprobs=request.logprobs is not None,
            prefix="cmpl",
            kind="text_completion",
            opening=b'"text":',
        )
        self._echo = bool(request.echo)
        self._columns: dict[int, LegacyColumns] = {}
        self._going_on = b',"logprobs":null,"finish_reason":null,"stop_reason":null}' + self._tail

    def begin(self, prompt: int, output: RequestOutput, usage: bytes = b"") -> bytes:
        """Return an event with the prompt, if the request asks for its echo, ids or logprobs; else b""."""
        if not (self._echo or self._with_prompt_logprobs or self._with_ids):
            return b""
        echoed = self._echoed(prompt, output)
        logprobs = self._echoed_logprobs(echoed, output)
        parts = [ENCODE(echoed), b',"logprobs":', ENCODE(logprobs), b',"finish_reason":null,"stop_reason":null']
        if self._with_prompt_logprobs:
            parts += [b',"prompt_logprobs":', ENCODE(output.prompt_logprobs)]
        if self._with_ids:
            parts += [b',"prompt_token_ids":', ENCODE(output.prompt_token_ids), b',"token_ids":[]']
        body = b"".join([*parts, b"}", self.tail(usage)])
        n = self._job.params.n
        return b"".join(self._heads[choice] + body for choice in range(prompt * n, prompt * n + n))

    def piece(self, choice: int, piece: CompletionOutput, usage: bytes) -> bytes:
        """Return the event for a new piece of a choice; b"" when there is nothing to show."""
        if self._text_only and not usage and piece.finish_reason is None:
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
        return b"".join([*parts, b"}", self.tail(usage)])

    def whole(self, outputs: list[RequestOutput], usage: schema.Usage) -> bytes:
        """Return the whole answer."""
        choices: list[schema.CompletionChoice] = []
        for prompt, output in enumerate(outputs):
            echoed = self._echoed(prompt, output) if self._echo else ""
            before = self._echoed_logprobs(echoed, output)
            for completion in output.outputs:
                choices.append(self._choice(prompt, output, completion, echoed, before))
        return ENCODE(
            schema.CompletionResponse(
                **self._shared,
                choices=choices,
                usage=usage,
                kv_transfer_params=outputs[0].kv_transfer_params or msgspec.UNSET,
            )
        )

    def _choice(
        self,
        prompt: int,
        output: RequestOutput,
        completion: CompletionOutput,
        echoed: str,
        before: schema.LegacyLogprobs | None,
    ) -> schema.CompletionChoice:
        choice, logprobs = prompt * self._job.params.n + completion.index, before
        if self._with_logprobs:
            rows: list[LogprobsByToken] = completion.logprobs or []
            after = self._choice_columns(choice, len(echoed)).rows(completion.token_ids[: len(rows)], rows)
            logprobs = after if before is None else joined(before, after)
        made = schema.CompletionChoice(
            index=choice,
            text=echoed + completion.text,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if self._with_ids or self._with_prompt_logprobs:
            made.prompt_logprobs = output.prompt_logprobs if self._with_prompt_logprobs else None
            made.prompt_token_ids, made.token_ids = (
                (output.prompt_token_ids, completion.token_ids) if self._with_ids else (None, None)
            )
        return made

    def _choice_columns(self, choice: int, offset: int = 0) -> LegacyColumns:
        columns = self._columns.get(choice)
        if columns is None:
            skip = self._job.params.skip_special_tokens
            columns = self._columns[choice] = LegacyColumns(self._names, skip_special=skip, offset=offset)
        return columns

    def _echoed(self, prompt: int, output: RequestOutput) -> str:
        """Return the text of an echoed prompt: the given text, or its decoded tokens. Without echo: ""."""
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

    def _echoed_logprobs(self, text: str, output: RequestOutput) -> schema.LegacyLogprobs | None:
        if not (self._echo and self._with_logprobs and output.prompt_logprobs is not None):
            return None
        return prompt_columns(self._names, text, output.prompt_token_ids, output.prompt_logprobs)
